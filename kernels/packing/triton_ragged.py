"""`pack`, `unpack`, `position_ids` and `sequence_index` in Triton: copies of runs of memory.

A row is shared by a few programs that take its blocks in turn. Elements are moved as integers of their size, so that
every bit arrives; each load and store is one run of memory. Kernels keep to the API of Triton 3.2 (NVIDIA and Ascend).

Legend: B sequences, T tokens of a row, M tokens laid end to end, W elements of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pekoe.kernels.packing.reference_ragged import check_rows

BLOCK = 1024
BLOCKS_PER_PROGRAM = 4
MAX_PROGRAMS = 32768
"""Programs of a launch; Ascend takes 65535."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def copy_rows(
    padded, packed, cu_seqlens, starts, fill, row_stride, length, width, parts,
    has_starts: tl.constexpr, to_packed: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Rows of `padded` to `packed`, or back with `fill` where there is no token."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    first = tl.load(cu_seqlens + row).to(tl.int64)
    size = (tl.load(cu_seqlens + row + 1).to(tl.int64) - first) * width
    begin = tl.zeros([], tl.int64)
    if has_starts:
        begin = tl.load(starts + row).to(tl.int64) * width
    line = padded + row.to(tl.int64) * row_stride
    packed += first * width
    place = tl.arange(0, block)
    for start in range(part * block, size, parts * block):
        inside = start + place < size
        if to_packed:
            tl.store(packed + start + place, tl.load(line + begin + start + place, mask=inside, other=0), mask=inside)
        else:
            tl.store(line + begin + start + place, tl.load(packed + start + place, mask=inside, other=0), mask=inside)
    if not to_packed:
        blank = tl.zeros([block], padded.dtype.element_ty) + tl.load(fill)
        for start in range(part * block, begin, parts * block):
            tl.store(line + start + place, blank, mask=start + place < begin)
        behind = begin + size
        rest = length * width - behind
        for start in range(part * block, rest, parts * block):
            tl.store(line + behind + start + place, blank, mask=start + place < rest)


@triton.jit
def number_tokens(cu_seqlens, out, first_row, parts, is_position: tl.constexpr, block: tl.constexpr):
    """Positions inside a sequence, or the sequence's number."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin = tl.load(cu_seqlens + row)
    size = tl.load(cu_seqlens + row + 1) - begin
    place = tl.arange(0, block)
    for start in range(part * block, size, parts * block):
        number = start + place
        if not is_position:
            number = tl.zeros([block], tl.int32) + (row + first_row)
        tl.store(out + begin + start + place, number.to(tl.int32), mask=start + place < size)


def _arrays_too(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """numpy arrays, which only the interpreter meets, go in and come back as such."""

    def tensor(value: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        result = function(*map(tensor, given), **{name: tensor(one) for name, one in named.items()})
        return result.numpy() if isinstance(next(iter((*given, *named.values()))), np.ndarray) else result

    return call


@_arrays_too
def pack(padded: Tensor, cu_seqlens: Tensor, starts: Tensor | None, num_tokens: int) -> Tensor:
    """[M, ...] of `padded` [B, T, ...]."""
    check_rows(cu_seqlens, starts, padded.shape[1])
    packed = torch.empty((num_tokens, *padded.shape[2:]), dtype=padded.dtype, device=padded.device)
    if not padded[:1].is_contiguous():
        padded = padded.contiguous()
    _copy(padded, packed, cu_seqlens, starts, 0, to_packed=True)
    return packed


@_arrays_too
def unpack(packed: Tensor, cu_seqlens: Tensor, starts: Tensor | None, max_length: int, fill: float) -> Tensor:
    """[B, T, ...] of `packed` [M, ...]."""
    check_rows(cu_seqlens, starts, max_length)
    shape = (len(cu_seqlens) - 1, max_length, *packed.shape[1:])
    padded = torch.empty(shape, dtype=packed.dtype, device=packed.device)
    _copy(padded, packed.contiguous(), cu_seqlens, starts, fill, to_packed=False)
    return padded


@_arrays_too
def position_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[M] int32."""
    return _numbers(cu_seqlens, num_tokens, is_position=True)


@_arrays_too
def sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[M] int32."""
    return _numbers(cu_seqlens, num_tokens, is_position=False)


def _copy(
    padded: Tensor, packed: Tensor, cu_seqlens: Tensor, starts: Tensor | None, fill: float, to_packed: bool
) -> None:
    if not padded.numel():
        return
    blank = torch.full((1,), fill, dtype=padded.dtype, device=padded.device)
    item = INTEGERS.get(padded.element_size())
    if item is None:
        raise ValueError(f"padded: {padded.dtype} is not allowed; elements of 1, 2, 4 or 8 bytes")
    length, width = padded.shape[1], padded[0, 0].numel()
    parts = _parts(length * width)
    for rows in _launches(len(padded), parts):
        copy_rows[((rows.stop - rows.start) * parts,)](
            padded[rows].view(item), packed.view(item), cu_seqlens[rows.start :],
            None if starts is None else starts[rows], blank.view(item), padded.stride(0), length, width, parts,
            has_starts=starts is not None, to_packed=to_packed, block=BLOCK,
        )  # fmt: skip


def _numbers(cu_seqlens: Tensor, num_tokens: int, is_position: bool) -> Tensor:
    out = torch.empty(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    bounds = cu_seqlens.to(torch.int32)
    num_sequences = len(bounds) - 1
    parts = _parts(num_tokens // max(1, num_sequences))
    for rows in _launches(num_sequences, parts):
        number_tokens[((rows.stop - rows.start) * parts,)](
            bounds[rows.start :], out, rows.start, parts, is_position=is_position, block=BLOCK
        )
    return out


def _parts(elements: int) -> int:
    """Programs that share a row of so many elements."""
    return min(MAX_PROGRAMS, max(1, elements // (BLOCK * BLOCKS_PER_PROGRAM)))


def _launches(num_rows: int, parts: int) -> Iterator[slice]:
    step = max(1, MAX_PROGRAMS // parts)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
