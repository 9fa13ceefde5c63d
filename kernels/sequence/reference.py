"""What the sequence room computes, in plain torch on any device.

A scan is done by doubling: after round k every x holds the first 2^k terms of its sum, so there are log2 of the longest
sequence rounds, no padding, and no loop over tokens. All of it is computed in double precision where the device has it.

Legend: M tokens laid end to end, K active ones, S sequences, N timesteps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.kernels.boundaries import checked_boundaries

SINGLE_ONLY = ("npu", "mps")
"""Device types that have no doubles, or slow ones."""


def gae(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    cu_seqlens: Tensor,
    discount: float,
    lambdas: Tensor,
    turns: Tensor | None,
    bootstrap: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [M]."""
    wide = _wide(rewards)
    own = torch.zeros_like(rewards, dtype=wide) if values is None else values.to(wide)
    active = torch.nonzero(mask).flatten()
    owner = _owner(cu_seqlens, len(rewards))[active]
    begins = torch.ones(len(active), dtype=torch.bool, device=rewards.device)
    if turns is not None:
        turn = turns[active]
        begins[1:] = (owner[1:] != owner[:-1]) | (turn[1:] != turn[:-1])
    step, sequence, value = begins.cumsum(0) - 1, owner[begins], own[active[begins]]
    earned = torch.zeros_like(value).index_add(0, step, rewards.to(wide)[active])
    is_end = torch.ones(len(value), dtype=torch.bool, device=value.device)
    is_end[:-1] = sequence[1:] != sequence[:-1]
    after = torch.zeros_like(lambdas, dtype=wide) if bootstrap is None else bootstrap.to(wide)
    following = torch.where(is_end, after[sequence], value.roll(-1))
    delta = earned + discount * following - value
    advantage = doubling(delta, (discount * lambdas.to(wide))[sequence], sequence)
    spread = torch.zeros_like(own).index_copy(0, active, advantage[step])
    returns = own.index_copy(0, active, (advantage + value)[step])
    return spread.to(rewards.dtype), returns.to(rewards.dtype)


def discounted_sums(values: Tensor, decay: Tensor, cu_seqlens: Tensor, from_left: bool) -> Tensor:
    """[M] from the right, or from the left."""
    owner, wide = _owner(cu_seqlens, len(values)), _wide(values)
    x, by = values.to(wide), decay.to(wide)[owner]
    if from_left:
        return doubling(x.flip(0), by.flip(0), owner.flip(0)).flip(0).to(values.dtype)
    return doubling(x, by, owner).to(values.dtype)


def segment_sum(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[S]"""
    return _totals(values, mask, cu_seqlens)[0].to(values.dtype)


def segment_mean(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[S]"""
    total, count = _totals(values, mask, cu_seqlens)
    return (total / count.clamp(min=1)).to(values.dtype)


def doubling(values: Tensor, decay: Tensor, owner: Tensor) -> Tensor:
    """[N] `x_i = values_i + decay x_{i+1}` where the neighbours in `owner` [N] are equal; `decay` [N] is the same for
    all of a sequence."""
    total, weight, distance = values.clone(), decay.clone(), 1
    while distance < len(values):
        inside = owner[distance:] == owner[:-distance]
        if not inside.any():
            break
        further = torch.where(inside, weight[:-distance] * total[distance:], torch.zeros_like(total[distance:]))
        total[:-distance] += further
        weight, distance = weight.square(), 2 * distance
    return total


def _totals(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    owner, wide = _owner(cu_seqlens, len(values)), _wide(values)
    kept = values.to(wide) if mask is None else torch.where(mask != 0, values.to(wide), 0)
    counted = torch.ones_like(kept) if mask is None else (mask != 0).to(wide)
    none = torch.zeros(len(cu_seqlens) - 1, dtype=wide, device=values.device)
    return none.index_add(0, owner, kept), none.index_add(0, owner, counted)


def _owner(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[M] int64 the sequence of a token. ValueError for wrong boundaries, on the CPU."""
    if cu_seqlens.device.type == "cpu":
        checked_boundaries(cu_seqlens, num_tokens)
    rows = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return rows.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def _wide(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type in SINGLE_ONLY else torch.float64
