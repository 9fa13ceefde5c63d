"""Clipped importance sampling: the ratio is bounded as a weight, and every token keeps its gradient.

    -sg(clip(r, 1 - eps_clip, 1 + eps_clip_higher)) A log pi_theta

Source: MiniMax 2025 (MiniMax-M1: CISPO).
"""

from __future__ import annotations

from pekoe.pipeline.algorithm.policy_terms import PolicyTerms, TokenLoss
from pekoe.pipeline.algorithm.ratios import policy_ratio


def cispo(terms: PolicyTerms) -> TokenLoss:
    """Needs `eps_clip_higher`; counts the tokens whose weight is bounded."""
    config = terms.config
    if config.eps_clip is None or config.eps_clip_higher is None:
        raise ValueError("actor.eps_clip_higher: objective cispo needs it, and eps_clip; null is not allowed")
    ratio, advantages = policy_ratio(terms)
    low, high = 1 - config.eps_clip, 1 + config.eps_clip_higher
    weight = ratio.detach().clamp(low, high)
    return TokenLoss(
        -weight * advantages * terms.logprobs,
        {"clipped_lower": ratio.detach() < low, "clipped_higher": ratio.detach() > high},
    )
