"""Generalised advantage estimation on packed sequences, with a timestep a token or a turn.

    delta_i = R_i + discount V_{i+1} - V_i          A_i = delta_i + discount lambda A_{i+1}

Tokens that were not sampled are skipped: they neither discount nor decay, and their values are never read. A turn's
reward is the sum of its tokens' rewards, its value the one at its first active token, and all its tokens get its
advantage. Without a critic values are 0: discounted sums of rewards. Sources: Schulman et al. 2016 (GAE); Yue et al.
2025 (VAPO: lambda by length).

Legend: M tokens laid end to end, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.kernels.sequence import sequence
from pekoe.pipeline.algorithm.estimator_terms import EstimatorTerms
from pekoe.pipeline.algorithm.timesteps import UNITS, timesteps
from pekoe.pipeline.config.actor import ActorConfig


def gae(terms: EstimatorTerms) -> tuple[Tensor, Tensor]:
    """Advantages [M] (0 on masked tokens) and returns [M] = advantage + value (a masked token's own value there), both
    float64."""
    config = terms.config
    if config.gae_unit not in UNITS:
        raise ValueError(f"actor.gae_unit: {config.gae_unit!r} is not allowed; token or turn")
    lam: float | Tensor = config.gae_lambda
    if config.gae_lambda_by_length is not None:
        lam = lambdas(timesteps(terms.mask, terms.turns, terms.cu_seqlens, config.gae_unit).counts, config)
    return sequence.gae(
        terms.rewards.double(), None if terms.values is None else terms.values.double(), terms.mask, terms.cu_seqlens,
        discount=config.discount, lam=lam, turns=terms.turns if config.gae_unit == "turn" else None,
        bootstrap=terms.bootstrap,
    )  # fmt: skip


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
