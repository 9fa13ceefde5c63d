"""The sequence room's operators of torch: on any device, traced by torch.compile, differentiable where values flow.

    torch.ops.pekoe.gae(rewards, values?, mask, cu_seqlens, discount, lambdas, turns?, bootstrap?)
    torch.ops.pekoe.discounted_sums(values, decay, cu_seqlens, from_left)
    torch.ops.pekoe.segment_sum(values, mask?, cu_seqlens), segment_mean

Legend: M tokens laid end to end, S sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pekoe.kernels.registry import kernel
from pekoe.kernels.torch_operators import add_gradient, add_operator

REALS = (torch.float32, torch.float64)


def _gae(rewards: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = kernel("sequence.gae", rewards.device.type)(rewards, *others)
    return result


def _discounted_sums(values: Tensor, decay: Tensor, cu_seqlens: Tensor, from_left: bool) -> Tensor:
    run = kernel("sequence.discounted_sums", values.device.type)
    result: Tensor = run(values, decay, cu_seqlens, from_left)
    return result


def _segment_sum(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    result: Tensor = kernel("sequence.segment_sum", values.device.type)(values, mask, cu_seqlens)
    return result


def _segment_mean(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    result: Tensor = kernel("sequence.segment_mean", values.device.type)(values, mask, cu_seqlens)
    return result


def _two_like_rewards(rewards: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return rewards.new_empty(rewards.shape), rewards.new_empty(rewards.shape)


def _like_values(values: Tensor, *others: Any) -> Tensor:
    return values.new_empty(values.shape)


def _one_a_sequence(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    return values.new_empty(cu_seqlens.shape[0] - 1)


def _keep_scan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, decay, cu_seqlens, ctx.from_left = inputs
    ctx.save_for_backward(decay, cu_seqlens)


def _scan_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The adjoint is the same sum from the other end."""
    decay, cu_seqlens = ctx.saved_tensors
    return torch.ops.pekoe.discounted_sums(gradient, decay, cu_seqlens, not ctx.from_left), None, None, None


def _keep_segments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, mask, cu_seqlens = inputs
    ctx.save_for_backward(mask, cu_seqlens)
    ctx.num_tokens = values.shape[0]


def _sum_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    mask, cu_seqlens = ctx.saved_tensors
    return _spread(gradient, mask, cu_seqlens, ctx.num_tokens), None, None


def _mean_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    mask, cu_seqlens = ctx.saved_tensors
    if mask is None:
        count = cu_seqlens.diff().to(gradient.dtype)
    else:
        count = torch.ops.pekoe.segment_sum(mask.ne(0).to(gradient.dtype), None, cu_seqlens)
    return _spread(gradient / count.clamp(min=1), mask, cu_seqlens, ctx.num_tokens), None, None


def _spread(gradient: Tensor, mask: Tensor | None, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[M] each sequence's gradient on its tokens."""
    each = gradient.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
    return each if mask is None else each.masked_fill(mask.eq(0), 0)


add_operator(
    "gae(Tensor rewards, Tensor? values, Tensor mask, Tensor cu_seqlens, float discount, Tensor lambdas, "
    "Tensor? turns, Tensor? bootstrap) -> (Tensor, Tensor)",
    _gae,
    _two_like_rewards,
)
add_operator(
    "discounted_sums(Tensor values, Tensor decay, Tensor cu_seqlens, bool from_left) -> Tensor",
    _discounted_sums,
    _like_values,
)
add_operator("segment_sum(Tensor values, Tensor? mask, Tensor cu_seqlens) -> Tensor", _segment_sum, _one_a_sequence)
add_operator("segment_mean(Tensor values, Tensor? mask, Tensor cu_seqlens) -> Tensor", _segment_mean, _one_a_sequence)
add_gradient("discounted_sums", _scan_backward, _keep_scan)
add_gradient("segment_sum", _sum_backward, _keep_segments)
add_gradient("segment_mean", _mean_backward, _keep_segments)
