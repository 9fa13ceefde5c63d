"""Soft adaptive policy optimisation: a smooth gate in place of the clip.

    -g(r) A,   g = (4 / tau) sigmoid(tau (r - 1)),   r = pi_theta / pi_b,   tau by the sign of A

The gate's slope is 1 at r = 1 and falls off on both sides. Source: Gao et al. 2025 (SAPO).
"""

from __future__ import annotations

import torch

from pekoe.pipeline.algorithm.policy_terms import PolicyTerms, TokenLoss
from pekoe.pipeline.algorithm.ratios import policy_ratio


def sapo(terms: PolicyTerms) -> TokenLoss:
    """Not decoupled: the ratio is against the behaviour policy. Nothing is clipped."""
    config = terms.config
    if config.use_decoupled_loss:
        raise ValueError("actor.use_decoupled_loss: true is not allowed with objective sapo; false")
    ratio, advantages = policy_ratio(terms)
    tau = torch.full_like(ratio, config.sapo_tau_neg).masked_fill(advantages > 0, config.sapo_tau_pos)
    return TokenLoss(-(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages)
