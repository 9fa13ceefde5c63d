"""What `pack`, `unpack`, `position_ids`, `sequence_index` and `zigzag_split` mean: index arithmetic, the first four on
arrays and on tensors of any device.

Legend: B sequences, T tokens of a row, M tokens laid end to end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pekoe.kernels.boundaries import is_tensor


def pack(padded: Any, cu_seqlens: Any, starts: Any, num_tokens: int) -> Any:
    """[M, ...] of `padded` [B, T, ...]."""
    rows, length, *rest = padded.shape
    check_rows(cu_seqlens, starts, length)
    return padded.reshape(rows * length, *rest)[_slots(cu_seqlens, starts, length, num_tokens)]


def unpack(packed: Any, cu_seqlens: Any, starts: Any, max_length: int, fill: float) -> Any:
    """[B, T, ...] of `packed` [M, ...]."""
    num_sequences, (num_tokens, *rest) = len(cu_seqlens) - 1, packed.shape
    check_rows(cu_seqlens, starts, max_length)
    shape = (num_sequences * max_length, *rest)
    out = packed.new_full(shape, fill) if is_tensor(packed) else np.full(shape, fill, dtype=packed.dtype)
    out[_slots(cu_seqlens, starts, max_length, num_tokens)] = packed
    return out.reshape(num_sequences, max_length, *rest)


def position_ids(cu_seqlens: Any, num_tokens: int) -> Any:
    """[M] int32."""
    if is_tensor(cu_seqlens):
        return (_arange(num_tokens, cu_seqlens) - _repeat(cu_seqlens[:-1], cu_seqlens, num_tokens)).int()
    return (_arange(num_tokens, cu_seqlens) - _repeat(cu_seqlens[:-1], cu_seqlens, num_tokens)).astype(np.int32)


def sequence_index(cu_seqlens: Any, num_tokens: int) -> Any:
    """[M] int32."""
    rows = _repeat(_arange(len(cu_seqlens) - 1, cu_seqlens), cu_seqlens, num_tokens)
    return rows.int() if is_tensor(rows) else rows.astype(np.int32)


def zigzag_split(
    cu_seqlens: npt.NDArray[np.int64], padded: npt.NDArray[np.int64], num_ranks: int
) -> tuple[npt.NDArray[np.int32], ...]:
    """Indices and positions [R, C], inverse [M]: chunk by chunk."""
    indices: list[list[int]] = [[] for _ in range(num_ranks)]
    positions: list[list[int]] = [[] for _ in range(num_ranks)]
    for begin, end, room in zip(cu_seqlens[:-1], cu_seqlens[1:], np.diff(padded), strict=True):
        chunks = np.split(np.arange(room), 2 * num_ranks)
        for rank in range(num_ranks):
            mine = np.concatenate([chunks[rank], chunks[2 * num_ranks - 1 - rank]])
            positions[rank] += mine.tolist()
            indices[rank] += np.where(mine < end - begin, begin + mine, -1).tolist()
    flat = np.array(indices, dtype=np.int32).reshape(num_ranks, -1)
    inverse = np.empty(cu_seqlens[-1], dtype=np.int32)
    inverse[flat[flat >= 0]] = np.flatnonzero(flat.reshape(-1) >= 0)
    return flat, np.array(positions, dtype=np.int32).reshape(flat.shape), inverse


def check_rows(cu_seqlens: Any, starts: Any, length: int) -> None:
    """ValueError naming the first sequence that does not lie inside a row of `length` tokens; on the CPU only."""
    if is_tensor(cu_seqlens) and cu_seqlens.device.type != "cpu":
        return
    sizes = np.diff(np.asarray(cu_seqlens))
    begins = np.zeros_like(sizes) if starts is None else np.asarray(starts)
    outside = (sizes < 0) | (begins < 0) | (begins + sizes > length)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise does_not_fit(row, int(begins[row]), int(sizes[row]), length)


def does_not_fit(row: int, begin: int, size: int, length: int) -> ValueError:
    """The error of `pack` and `unpack`."""
    return ValueError(f"sequence {row}: tokens {begin} to {begin + size} are not allowed in a row of {length}")


def _slots(cu_seqlens: Any, starts: Any, length: int, num_tokens: int) -> Any:
    """[M] int64 place of each packed token among the B * T padded ones."""
    begins = _arange(len(cu_seqlens) - 1, cu_seqlens) * length - cu_seqlens[:-1]
    if starts is not None:
        begins = begins + starts
    return _repeat(begins, cu_seqlens, num_tokens) + _arange(num_tokens, cu_seqlens)


def _arange(number: int, like: Any) -> Any:
    if not is_tensor(like):
        return np.arange(number)
    import torch

    return torch.arange(number, device=like.device)


def _repeat(values: Any, cu_seqlens: Any, num_tokens: int) -> Any:
    """[M] each of `values` [B] for every token of its sequence."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    if is_tensor(values):
        return values.repeat_interleave(lengths, output_size=num_tokens)
    return np.repeat(values, lengths)
