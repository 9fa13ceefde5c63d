"""The clipped objective of PPO and its descendants (GRPO, DAPO, GSPO, IcePop, M2PO …).

    max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_higher))          dual clip: at most |A| c_clip where A < 0

Sources: Schulman et al. 2017 (PPO); Ye et al. 2020 (dual clip); Yu et al. 2025 (DAPO: clip higher).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.policy_terms import PolicyTerms, TokenLoss
from pekoe.pipeline.algorithm.ratios import policy_ratio


def ppo(terms: PolicyTerms) -> TokenLoss:
    """Ratios per token, or per sequence with the mean advantage (`importance_sampling_level`)."""
    config = terms.config
    ratio, advantages = policy_ratio(terms)
    return clipped_loss(ratio, advantages, config.eps_clip, config.eps_clip_higher, config.c_clip)


def clipped_loss(
    ratio: Tensor, advantages: Tensor, eps_clip: float | None, eps_clip_higher: float | None, c_clip: float | None
) -> TokenLoss:
    """`eps_clip` null clips nothing; `eps_clip_higher` null is `eps_clip`. Counts `clipped_lower`, `clipped_higher` and
    `dual_clipped`: tokens whose loss a bound has changed."""
    pg = -advantages * ratio
    lower = higher = dual = torch.zeros_like(pg, dtype=torch.bool)
    if eps_clip is not None:
        bounds = (1 - eps_clip, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher))
        bounded = -advantages * ratio.clamp(*bounds)
        lower, higher = (bounded > pg) & (ratio < bounds[0]), (bounded > pg) & (ratio > bounds[1])
        pg = torch.maximum(pg, bounded)
    if c_clip is not None:
        ceiling = advantages.abs() * c_clip
        dual = (advantages < 0) & (pg > ceiling)
        pg = torch.where(dual, ceiling, pg)
    return TokenLoss(pg, {"clipped_lower": lower, "clipped_higher": higher, "dual_clipped": dual})
