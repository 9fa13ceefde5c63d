"""`pack`, `unpack`, `position_ids`, `sequence_index` and `zigzag_split` in C, on numpy arrays and on CPU tensors; rows
are copied as bytes.

Legend: B sequences, T tokens of a row, M tokens laid end to end.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pekoe.kernels.boundaries import checked_boundaries, is_tensor, on_host
from pekoe.kernels.native.native_library import POINTER, SIZE, NativeFunctions, pointer
from pekoe.kernels.packing.reference_ragged import does_not_fit

FUNCTIONS = NativeFunctions(
    {
        "pack": (POINTER, SIZE, SIZE, SIZE, POINTER, POINTER, SIZE, POINTER),
        "unpack": (POINTER, SIZE, POINTER, POINTER, SIZE, SIZE, POINTER, SIZE, POINTER),
        "position_ids": (POINTER, SIZE, POINTER),
        "sequence_index": (POINTER, SIZE, POINTER),
        "zigzag": (POINTER, POINTER, SIZE, SIZE, POINTER, POINTER, POINTER),
    },
    SIZE,
)


def pack(padded: Any, cu_seqlens: Any, starts: Any, num_tokens: int) -> Any:
    """[M, ...] of `padded` [B, T, ...]; a slice of rows or of the first tokens of each row goes in without a copy."""
    bounds, begins = checked_boundaries(cu_seqlens, num_tokens), _begins(starts)
    source, row_stride = _rows(padded)
    num_sequences, length, *rest = source.shape
    width = _item_size(source) * math.prod(rest)
    out = _empty((num_tokens, *rest), source)
    status = FUNCTIONS["pack"](
        source.data_ptr() if is_tensor(source) else source.ctypes.data, row_stride, length, width, pointer(bounds),
        None if begins is None else pointer(begins), num_sequences, pointer(out),
    )  # fmt: skip
    _raise_outside(status, bounds, begins, length)
    return out


def unpack(packed: Any, cu_seqlens: Any, starts: Any, max_length: int, fill: float) -> Any:
    """[B, T, ...] of `packed` [M, ...]."""
    source: Any = packed.contiguous() if is_tensor(packed) else np.ascontiguousarray(packed)
    bounds, begins = checked_boundaries(cu_seqlens, len(source)), _begins(starts)
    num_sequences, rest = len(bounds) - 1, source.shape[1:]
    item = _item_size(source)
    pattern = source.new_full((1,), fill) if is_tensor(source) else np.full(1, fill, dtype=source.dtype)
    out = _empty((num_sequences, max_length, *rest), source)
    status = FUNCTIONS["unpack"](
        pointer(source), item * math.prod(rest), pointer(bounds), None if begins is None else pointer(begins),
        num_sequences, max_length, pointer(pattern), item, pointer(out),
    )  # fmt: skip
    _raise_outside(status, bounds, begins, max_length)
    return out


def position_ids(cu_seqlens: Any, num_tokens: int) -> Any:
    """[M] int32."""
    return _per_token(FUNCTIONS["position_ids"], cu_seqlens, num_tokens)


def sequence_index(cu_seqlens: Any, num_tokens: int) -> Any:
    """[M] int32."""
    return _per_token(FUNCTIONS["sequence_index"], cu_seqlens, num_tokens)


def zigzag_split(
    cu_seqlens: npt.NDArray[np.int64], padded: npt.NDArray[np.int64], num_ranks: int
) -> tuple[npt.NDArray[np.int32], ...]:
    """Indices and positions [R, C], inverse [M]."""
    share = int(padded[-1]) // num_ranks
    indices, positions = (np.empty((num_ranks, share), dtype=np.int32) for _ in range(2))
    inverse = np.empty(cu_seqlens[-1], dtype=np.int32)
    status = FUNCTIONS["zigzag"](
        pointer(cu_seqlens), pointer(padded), len(cu_seqlens) - 1, num_ranks, pointer(indices), pointer(positions),
        pointer(inverse),
    )  # fmt: skip
    assert status == 0, "sequences do not fit into their padded ones"
    return indices, positions, inverse


def _per_token(function: Any, cu_seqlens: Any, num_tokens: int) -> Any:
    bounds = checked_boundaries(cu_seqlens, num_tokens)
    out = np.empty(num_tokens, dtype=np.int32)
    function(pointer(bounds), len(bounds) - 1, pointer(out))
    if not is_tensor(cu_seqlens):
        return out
    import torch

    return torch.from_numpy(out)


def _begins(starts: Any) -> npt.NDArray[np.int64] | None:
    return None if starts is None else on_host(starts, "starts")


def _rows(padded: Any) -> tuple[Any, int]:
    """The array, copied only where a row's tokens are not contiguous, and the bytes from row to row."""
    item = _item_size(padded)
    strides = [item * s for s in padded.stride()] if is_tensor(padded) else list(padded.strides)
    expected, inner = item, True
    for size, stride in zip(reversed(padded.shape[1:]), reversed(strides[1:]), strict=True):
        inner = inner and (size == 1 or stride == expected)
        expected *= size
    if not inner:
        padded = padded.contiguous() if is_tensor(padded) else np.ascontiguousarray(padded)
        strides[0] = expected
    return padded, strides[0]


def _item_size(array: Any) -> int:
    return int(array.element_size() if is_tensor(array) else array.itemsize)


def _empty(shape: tuple[int, ...], like: Any) -> Any:
    """Fresh memory, a tensor's by way of numpy, too: its large arrays lie on huge pages, and a fresh small page costs
    more than what is copied into it."""
    if not is_tensor(like):
        return np.empty(shape, dtype=like.dtype)
    if 0 in shape:
        return like.new_empty(shape)
    import torch

    memory = np.empty(math.prod(shape) * _item_size(like), dtype=np.uint8)
    return torch.from_numpy(memory).view(like.dtype).view(shape)


def _raise_outside(
    status: int, bounds: npt.NDArray[np.int64], begins: npt.NDArray[np.int64] | None, length: int
) -> None:
    if status:
        row = status - 1
        begin = 0 if begins is None else int(begins[row])
        raise does_not_fit(row, begin, int(bounds[row + 1] - bounds[row]), length)
