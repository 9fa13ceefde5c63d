"""Padded arrays to packed ones and back, and what each token knows of its sequence.

    padded [B, T, ...] ── pack ──► packed [M, ...] ── unpack ──► padded [B, T, ...]

Any dtype of a fixed size. numpy arrays and tensors on the CPU go in without a copy where the dimensions after the first
are contiguous. With tensors, `pack` and `unpack` are differentiable in their first argument (each is the other's
gradient), run on the tensor's device, and are traced by torch.compile: give `num_tokens` and `max_length` there, which
otherwise are read from the device. Sizes are checked on the CPU only: no device is waited for.

Legend: B sequences, T the longest that a row holds, M tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from pekoe.kernels.boundaries import LARGEST, checked_boundaries, is_tensor, on_host
from pekoe.kernels.registry import kernel

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]


@overload
def pack(padded: Array, lengths: Any, starts: Any = None, *, num_tokens: int | None = None) -> Array: ...
@overload
def pack(padded: Tensor, lengths: Any, starts: Any = None, *, num_tokens: int | None = None) -> Tensor: ...
def pack(padded: Any, lengths: Any, starts: Any = None, *, num_tokens: int | None = None) -> Any:
    """[M, ...] the first `lengths` [B] tokens of each row of `padded` [B, T, ...], end to end; from `starts` [B] on
    where they are given (`T - lengths` where the padding is on the left). `num_tokens` is the sum of `lengths`.

    ValueError naming the row that a sequence does not fit into.
    """
    if is_tensor(padded):
        from pekoe.kernels.packing import torch_ragged

        return torch_ragged.pack(padded, lengths, starts, num_tokens)
    bounds = boundaries_of(lengths)
    return _pack_array(padded, bounds, starts)


def pack_fields(
    fields: Mapping[str, Any], lengths: Any, starts: Any = None, *, num_tokens: int | None = None
) -> dict[str, Any]:
    """`pack` of several arrays [B, T, ...] of the same rows, whose boundaries are found and checked once."""
    if any(is_tensor(field) for field in fields.values()):
        return {name: pack(field, lengths, starts, num_tokens=num_tokens) for name, field in fields.items()}
    bounds = boundaries_of(lengths)
    return {name: _pack_array(field, bounds, starts, name) for name, field in fields.items()}


def _pack_array(padded: Any, bounds: npt.NDArray[np.int64], starts: Any, name: str = "padded") -> Array:
    array = _numbers(name, padded)
    if array.ndim < 2 or len(array) != len(bounds) - 1:
        raise ValueError(f"{name}: {array.shape} is not allowed; [B, T, ...] of {len(bounds) - 1} lengths")
    result: Array = kernel("packing.pack")(array, bounds, _starts(starts, len(array)), int(bounds[-1]))
    return result


@overload
def unpack(
    packed: Array, cu_seqlens: Any, max_length: int | None = None, fill: float = 0, starts: Any = None
) -> Array: ...
@overload
def unpack(
    packed: Tensor, cu_seqlens: Any, max_length: int | None = None, fill: float = 0, starts: Any = None
) -> Tensor: ...
def unpack(packed: Any, cu_seqlens: Any, max_length: int | None = None, fill: float = 0, starts: Any = None) -> Any:
    """[B, T, ...] the sequences of `packed` [M, ...] with boundaries `cu_seqlens` [B+1], one a row, and `fill` where
    there is no token. T is `max_length` (absent: the longest). A sequence begins at its row's start, or at `starts`
    [B] (`T - lengths` puts the padding on the left).

    ValueError naming the sequence that its row does not hold.
    """
    if is_tensor(packed):
        from pekoe.kernels.packing import torch_ragged

        return torch_ragged.unpack(packed, cu_seqlens, max_length, fill, starts)
    array = _numbers("packed", packed)
    if not array.ndim:
        raise ValueError("packed: a single number is not allowed; [M, ...]")
    bounds = checked_boundaries(cu_seqlens, len(array))
    length = int(np.diff(bounds).max(initial=0)) if max_length is None else max_length
    return kernel("packing.unpack")(array, bounds, _starts(starts, len(bounds) - 1), length, fill)


def cumulative(lengths: Any) -> Int32:
    """[S+1] int32 `cu_seqlens` of `lengths` [S]."""
    return boundaries_of(lengths).astype(np.int32)


@overload
def position_ids(cu_seqlens: Array, num_tokens: int | None = None) -> Int32: ...
@overload
def position_ids(cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor: ...
def position_ids(cu_seqlens: Any, num_tokens: int | None = None) -> Any:
    """[M] int32 positions that restart at 0 in each sequence. `num_tokens` is M, the last entry of `cu_seqlens` [S+1],
    which is read from a tensor's device where it is absent."""
    return _per_token("position_ids", cu_seqlens, num_tokens)


@overload
def sequence_index(cu_seqlens: Array, num_tokens: int | None = None) -> Int32: ...
@overload
def sequence_index(cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor: ...
def sequence_index(cu_seqlens: Any, num_tokens: int | None = None) -> Any:
    """[M] int32 which sequence a token belongs to. `num_tokens` as in `position_ids`."""
    return _per_token("sequence_index", cu_seqlens, num_tokens)


def _per_token(operation: str, cu_seqlens: Any, num_tokens: int | None) -> Any:
    if is_tensor(cu_seqlens):
        from pekoe.kernels.packing import torch_ragged

        return torch_ragged.per_token(operation, cu_seqlens, num_tokens)
    bounds = checked_boundaries(cu_seqlens, num_tokens)
    return kernel(f"packing.{operation}")(bounds, int(bounds[-1]))


def boundaries_of(lengths: Any) -> npt.NDArray[np.int64]:
    """[S+1] int64 of `lengths` [S], which are on the host. ValueError naming a length below 0, or a sum that is not an
    int32."""
    found = on_host(lengths, "lengths")
    if (found < 0).any():
        row = int(np.flatnonzero(found < 0)[0])
        raise ValueError(f"lengths: {found[row]} of sequence {row} is not allowed; 0 or more")
    total = found.sum(dtype=np.float64)
    if total > LARGEST:
        raise ValueError(f"lengths: {total:.0f} tokens are not allowed; up to {LARGEST}")
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(found)])


def _numbers(name: str, array: Any) -> Array:
    found = np.asarray(array)
    if found.dtype.hasobject:
        raise ValueError(f"{name}: {found.dtype} is not allowed; a dtype of a fixed size")
    return found


def _starts(starts: Any, num_sequences: int) -> npt.NDArray[np.int64] | None:
    if starts is None:
        return None
    found = on_host(starts, "starts")
    if len(found) != num_sequences:
        raise ValueError(f"starts: {len(found)} entries are not allowed; one for each of {num_sequences} sequences")
    return found
