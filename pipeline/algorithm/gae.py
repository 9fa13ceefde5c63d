"""Generalised advantage estimation on packed sequences, with a timestep a token or a turn.

    delta_i = R_i + discount V_{i+1} - V_i          A_i = delta_i + discount lambda A_{i+1}

Tokens that were not sampled are skipped: they neither discount nor decay, and their values are never read. A turn's
reward is the sum of its tokens' rewards, its value the one at its first active token, and all its tokens get its
advantage. Without a critic values are 0: discounted sums of rewards. Sources: Schulman et al. 2016 (GAE); Yue et al.
2025 (VAPO: lambda by length).

Legend: M tokens laid end to end, S sequences, N timesteps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.estimator_terms import EstimatorTerms
from pekoe.pipeline.algorithm.timesteps import timesteps
from pekoe.pipeline.config.actor import ActorConfig


def gae(terms: EstimatorTerms) -> tuple[Tensor, Tensor]:
    """Advantages [M] (0 on masked tokens) and returns [M] = advantage + value (a masked token's own value there), both
    float64."""
    config = terms.config
    steps = timesteps(terms.mask, terms.turns, terms.cu_seqlens, config.gae_unit)
    rewards = steps.sum(terms.rewards.to(torch.float64))
    own = torch.zeros_like(terms.rewards, dtype=torch.float64) if terms.values is None else terms.values.double()
    values = own[steps.first]
    is_end = torch.ones(len(values), dtype=torch.bool, device=values.device)
    is_end[:-1] = steps.sequence[1:] != steps.sequence[:-1]
    after = torch.zeros(len(steps.counts), dtype=torch.float64, device=values.device)
    if terms.bootstrap is not None:
        after = terms.bootstrap.double()
    following = torch.where(is_end, after[steps.sequence], torch.roll(values, -1))
    delta = rewards + config.discount * following - values
    decay = config.discount * lambdas(steps.counts, config)
    advantages = discounted_sums(delta, decay[steps.sequence], steps.sequence)
    return steps.spread(advantages, torch.zeros_like(own)), steps.spread(advantages + values, own)


def lambdas(counts: Tensor, config: ActorConfig) -> Tensor:
    """[S] float64 lambda of sequences with `counts` [S] timesteps: `gae_lambda`, or by length L: vapo
    `max(0, 1 - 1 / (alpha L))`, relative `q^(1/(L-1))` (1 for L = 1); 0 where L is 0."""
    length = counts.to(torch.float64)
    how = config.gae_lambda_by_length
    if how is None:
        return torch.full_like(length, config.gae_lambda)
    if how == "vapo":
        return (1 - 1 / (config.gae_lambda_alpha * length)).clamp(min=0)
    if how == "relative":
        power = torch.pow(torch.full_like(length, config.gae_lambda_q), 1 / (length - 1).clamp(min=1))
        return torch.where(length > 1, power, length.clamp(max=1))
    raise ValueError(f"actor.gae_lambda_by_length: {how!r} is not allowed; vapo, relative or null")


def discounted_sums(values: Tensor, decay: Tensor, sequence: Tensor) -> Tensor:
    """[N] `x_i = values_i + decay x_{i+1}` inside each sequence (`sequence` [N] ascending, `decay` [N] constant in it).

    By doubling: after round k each x holds the first 2^k terms of its sum, so there are log2 of the longest sequence
    rounds and no padding; the rounding does not depend on what else is in the buffer.
    """
    total, weight, distance = values.clone(), decay.clone(), 1
    while distance < len(values):
        inside = sequence[distance:] == sequence[:-distance]
        if not inside.any():
            break
        further = torch.where(inside, weight[:-distance] * total[distance:], torch.zeros_like(total[distance:]))
        total[:-distance] += further
        weight, distance = weight.square(), 2 * distance
    return total
