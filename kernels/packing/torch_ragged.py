"""`pack`, `unpack`, `position_ids` and `sequence_index` as operators of torch: on any device, traced by torch.compile,
differentiable.

    torch.ops.pekoe.pack(padded, cu_seqlens, starts?, num_tokens)
    torch.ops.pekoe.unpack(packed, cu_seqlens, starts?, max_length, fill)

Legend: B sequences, T tokens of a row, M tokens laid end to end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pekoe.kernels.registry import kernel
from pekoe.kernels.torch_operators import add_gradient, add_operator


def pack(padded: Tensor, lengths: Any, starts: Any, num_tokens: int | None) -> Tensor:
    """See `ragged.pack`."""
    sizes = _whole_numbers(lengths, "lengths", padded.device)
    if padded.dim() < 2 or len(padded) != len(sizes):
        raise ValueError(f"padded: {tuple(padded.shape)} is not allowed; [B, T, ...] of {len(sizes)} lengths")
    bounds = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int64), (1, 0))
    total = int(bounds[-1]) if num_tokens is None else num_tokens
    result: Tensor = torch.ops.pekoe.pack(padded, bounds, _starts(starts, len(sizes), padded.device), total)
    return result


def unpack(packed: Tensor, cu_seqlens: Any, max_length: int | None, fill: float, starts: Any) -> Tensor:
    """See `ragged.unpack`."""
    bounds = _whole_numbers(cu_seqlens, "cu_seqlens", packed.device)
    if not packed.dim() or not len(bounds):
        raise ValueError(f"packed: {tuple(packed.shape)} with {len(bounds)} cu_seqlens is not allowed; [M, ...], [B+1]")
    if max_length is None:
        max_length = int(bounds.diff().max()) if len(bounds) > 1 else 0
    begins = _starts(starts, len(bounds) - 1, packed.device)
    result: Tensor = torch.ops.pekoe.unpack(packed, bounds, begins, max_length, fill)
    return result


def per_token(operation: str, cu_seqlens: Tensor, num_tokens: int | None) -> Tensor:
    """`position_ids` or `sequence_index`."""
    bounds = _whole_numbers(cu_seqlens, "cu_seqlens", cu_seqlens.device)
    if not len(bounds):
        raise ValueError("cu_seqlens: no entries are not allowed; [S+1], from 0")
    result: Tensor = getattr(torch.ops.pekoe, operation)(bounds, int(bounds[-1]) if num_tokens is None else num_tokens)
    return result


def _whole_numbers(numbers: Any, name: str, device: torch.device) -> Tensor:
    found = torch.as_tensor(numbers, device=device)
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        if found.numel():
            raise ValueError(f"{name}: {found.dtype} of shape {tuple(found.shape)} is not allowed; one row of integers")
        return found.flatten().long()
    return found


def _starts(starts: Any, num_sequences: int, device: torch.device) -> Tensor | None:
    if starts is None:
        return None
    found = _whole_numbers(starts, "starts", device)
    if len(found) != num_sequences:
        raise ValueError(f"starts: {len(found)} entries are not allowed; one for each of {num_sequences} sequences")
    return found


def _pack(padded: Tensor, cu_seqlens: Tensor, starts: Tensor | None, num_tokens: int) -> Tensor:
    result: Tensor = kernel("packing.pack", padded.device.type)(padded, cu_seqlens, starts, num_tokens)
    return result


def _unpack(packed: Tensor, cu_seqlens: Tensor, starts: Tensor | None, max_length: int, fill: float) -> Tensor:
    result: Tensor = kernel("packing.unpack", packed.device.type)(packed, cu_seqlens, starts, max_length, fill)
    return result


def _position_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    result: Tensor = kernel("packing.position_ids", cu_seqlens.device.type)(cu_seqlens, num_tokens)
    return result


def _sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    result: Tensor = kernel("packing.sequence_index", cu_seqlens.device.type)(cu_seqlens, num_tokens)
    return result


def _packed_shape(padded: Tensor, cu_seqlens: Tensor, starts: Tensor | None, num_tokens: int) -> Tensor:
    return padded.new_empty((num_tokens, *padded.shape[2:]))


def _padded_shape(packed: Tensor, cu_seqlens: Tensor, starts: Tensor | None, max_length: int, fill: float) -> Tensor:
    return packed.new_empty((cu_seqlens.shape[0] - 1, max_length, *packed.shape[1:]))


def _token_shape(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    return cu_seqlens.new_empty(num_tokens, dtype=torch.int32)


def _keep_for_pack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    padded, cu_seqlens, starts, _ = inputs
    ctx.save_for_backward(cu_seqlens, starts)
    ctx.max_length = padded.shape[1]


def _pack_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    cu_seqlens, starts = ctx.saved_tensors
    return torch.ops.pekoe.unpack(gradient, cu_seqlens, starts, ctx.max_length, 0), None, None, None


def _keep_for_unpack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    packed, cu_seqlens, starts, _, _ = inputs
    ctx.save_for_backward(cu_seqlens, starts)
    ctx.num_tokens = packed.shape[0]


def _unpack_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    cu_seqlens, starts = ctx.saved_tensors
    return torch.ops.pekoe.pack(gradient, cu_seqlens, starts, ctx.num_tokens), None, None, None, None


add_operator(
    "pack(Tensor padded, Tensor cu_seqlens, Tensor? starts, SymInt num_tokens) -> Tensor", _pack, _packed_shape
)
add_operator(
    "unpack(Tensor packed, Tensor cu_seqlens, Tensor? starts, SymInt max_length, Scalar fill) -> Tensor",
    _unpack,
    _padded_shape,
)
add_operator("position_ids(Tensor cu_seqlens, SymInt num_tokens) -> Tensor", _position_ids, _token_shape)
add_operator("sequence_index(Tensor cu_seqlens, SymInt num_tokens) -> Tensor", _sequence_index, _token_shape)
add_gradient("pack", _pack_backward, _keep_for_pack)
add_gradient("unpack", _unpack_backward, _keep_for_unpack)
