"""Log-probs of a vocabulary that is cut over the ranks of a process group (tensor parallelism).

    each rank: hidden [K, H] (the same everywhere) · its rows of the weight ──► statistics of its logits
    maximum: all-reduce of [K]; totals, moments, picked logits: one all-reduce of [4, K]
    backward: each rank makes its logits again; the gradient of the weight stays where it is, that of the hidden states
    is summed: all-reduce of [K, H] in float32

Everything that leaves is the same on all ranks, to the bit. What they are asked for must be, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pekoe.kernels.logprob.logprob import check_arguments
from pekoe.kernels.logprob.reference import Four
from pekoe.kernels.logprob.torch_logprob import hidden_backward, outputs
from pekoe.kernels.logprob.torch_tiles import lowered_by

OUTSIDE = -1
"""The target of a token that another rank has."""


def sharded_logprobs(
    hidden: Tensor,
    weight_shard: Tensor,
    first_row: int,
    targets: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    *,
    bias_shard: Tensor | None = None,
    num_valid: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """`logprob.hidden_logprobs` where each rank of `group` (None: all ranks) has `weight_shard` [V_r, H] and
    `bias_shard` [V_r], the rows of the vocabulary from `first_row` on; together they have each row once.

    `hidden` [K, H] and `targets` [K], which count from row 0 of the whole vocabulary, are replicated: the same on all
    ranks. So is what is made of the results, whose gradients must be equal on all ranks: the loss is the same on each,
    not a rank's share of it. The gradient of `hidden` is the whole one on each rank, that of the weight is the shard's.
    Shards may differ in size, and be empty. `num_valid` is the number of this shard's rows that are no padding.

    Takes part in collectives, in forward, and in backward where `hidden` needs a gradient. Memory on a rank is as for
    `hidden_logprobs`. Raises ValueError, on all ranks, naming a target that no rank has.
    """
    num_valid = len(weight_shard) if num_valid is None else num_valid
    check_arguments(hidden, weight_shard, bias_shard, targets, num_valid, temperature)
    logprobs, entropy = _ShardedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight_shard, bias_shard, targets, first_row, num_valid, float(temperature), group, with_entropy
    )
    return logprobs, entropy


class _ShardedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        first_row: int,
        num_valid: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        place = targets.to(torch.int64) - first_row
        inside = (place >= 0) & (place < num_valid)
        place = torch.where(inside, place, torch.full_like(place, OUTSIDE))
        four = torch.ops.pekoe.hidden_statistics(hidden, weight, bias, place, num_valid, temperature, with_entropy)
        merged = _merged(four, inside, targets, temperature, group)
        logprobs, entropy, mean = outputs(ctx, merged, temperature, with_entropy)
        ctx.save_for_backward(hidden, weight, bias, place, *merged[:2], mean)
        ctx.num_valid, ctx.temperature, ctx.group = num_valid, temperature, group
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        def add_up(grad_hidden: Tensor) -> None:
            dist.all_reduce(grad_hidden, group=ctx.group)

        return *hidden_backward(ctx, grad_logprobs, grad_entropy, add_up), *(None,) * 6


def _merged(four: Four, inside: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup | None) -> Four:
    """The statistics of all ranks together."""
    own, total, moment, picked = four
    maximum = own.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    lowered = lowered_by(own - maximum, temperature)
    shrink = lowered.exp()
    sums = torch.stack((shrink * total, shrink * (moment + lowered * total), picked, inside.to(total.dtype)))
    dist.all_reduce(sums, group=group)
    if (sums[3] != 1).any():
        token = int((sums[3] != 1).nonzero()[0])
        raise ValueError(f"targets[{token}]: {int(targets[token])} is not allowed; one rank must have it")
    return maximum, sums[0], sums[1], sums[2]
