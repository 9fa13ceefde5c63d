"""Per-token advantages of packed sequences: placing rewards, and generalised advantage estimation in the token unit.

Masked tokens are skipped: they neither discount nor decay, and their values are never read. Source: Schulman et al.
2016 (GAE). Legend: M tokens laid end to end, S sequences, L most active tokens of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.segments import segment_sum, sequence_index


def place_outcomes(outcomes: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rewards [M] (dtype of `outcomes`) with the outcome of each sequence [S] on its last active token, 0 elsewhere.

    A sequence without active tokens places nothing.
    """
    num_sequences = len(outcomes)
    active = torch.nonzero(mask).flatten()
    index = sequence_index(cu_seqlens)[active]
    last = torch.full((num_sequences,), -1, dtype=torch.int64, device=mask.device)
    last = last.scatter_reduce(0, index, active, reduce="amax")
    found = last >= 0
    rewards = torch.zeros(len(mask), dtype=outcomes.dtype, device=mask.device)
    return rewards.index_copy(0, last[found], outcomes[found])


def token_gae(
    rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    discount: float,
    gae_lambda: float | Tensor,
    values: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [M]: `delta = R_t + discount V_next - V_t; A_t = delta + discount lambda A_next` over
    active tokens.

    `rewards` and `values` [M] (values absent = 0); `gae_lambda` one number or one per sequence [S]; `bootstrap` [S]
    is the value after the last active token (absent = 0). Masked tokens get advantage 0 and their own value as
    return. Computed in float64.
    """
    kind, device = rewards.dtype, rewards.device
    active = torch.nonzero(mask).flatten()
    sequence = sequence_index(cu_seqlens)[active]
    num_sequences = len(cu_seqlens) - 1
    counts = segment_sum(torch.ones_like(sequence), sequence, num_sequences)
    column = torch.arange(len(active), device=device) - (torch.cumsum(counts, 0) - counts)[sequence]
    length = int(counts.max()) if num_sequences else 0

    def unpack(flat: Tensor) -> Tensor:
        padded = torch.zeros(num_sequences, length, dtype=torch.float64, device=device)
        padded[sequence, column] = flat[active].to(torch.float64)
        return padded

    value = torch.zeros_like(rewards) if values is None else values
    end = torch.zeros(num_sequences, device=device) if bootstrap is None else bootstrap
    advantages = _sweep(unpack(rewards), unpack(value), end.to(torch.float64), counts, discount, gae_lambda)
    flat = torch.zeros(len(rewards), dtype=torch.float64, device=device)
    flat[active] = advantages[sequence, column]
    return flat.to(kind), (flat + value.to(torch.float64)).to(kind)


def _sweep(
    rewards: Tensor, values: Tensor, end: Tensor, counts: Tensor, discount: float, gae_lambda: float | Tensor
) -> Tensor:
    """Advantages [S, L] of left-aligned active tokens, all sequences at once, from the right."""
    decay = discount * (gae_lambda if isinstance(gae_lambda, float | int) else gae_lambda.to(torch.float64))
    advantages = torch.zeros_like(rewards)
    running, following = torch.zeros_like(end), end.clone()
    for column in range(rewards.shape[1] - 1, -1, -1):
        inside = column < counts
        delta = rewards[:, column] + discount * following - values[:, column]
        running = torch.where(inside, delta + decay * running, running)
        following = torch.where(inside, values[:, column], following)
        advantages[:, column] = running
    return advantages
