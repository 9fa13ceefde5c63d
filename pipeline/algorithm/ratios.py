"""Importance ratios of the policy being optimised, per token or per sequence, and approximations of the proximal
policy."""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.kl import log_ratio, safe_exp
from pekoe.pipeline.algorithm.policy_terms import PolicyTerms
from pekoe.pipeline.algorithm.segments import segment_mean


def policy_ratio(terms: PolicyTerms) -> tuple[Tensor, Tensor]:
    """(ratio [M], advantages [M]): `exp(logprobs - prox)` per token, or the geometric mean over a sequence's active
    tokens.

    In sequence level (GSPO, Zheng et al. 2025) ratio and mean advantage are those of the sequence, on each of its
    tokens.
    """
    lr = log_ratio(terms.logprobs, terms.prox, terms.mask)
    level = terms.config.importance_sampling_level
    if level == "token":
        return safe_exp(lr), terms.advantages
    if level == "sequence":
        mean, advantage = (
            segment_mean(values, terms.mask, terms.index, terms.num_sequences)[terms.index]
            for values in (lr, terms.advantages)
        )
        return safe_exp(mean), advantage
    raise ValueError(f"importance_sampling_level: {level!r} is not allowed; token or sequence")


def loglinear_logprobs(logprobs: Tensor, behaviour: Tensor, versions: Tensor, version: int) -> Tensor:
    """Proximal log-probs without a forward pass (A-3PO): `b + alpha (sg(logprobs) - b)` per token.

    `alpha = clamp((version - 1 - v_b) / (version - v_b), 0, 1)` with the token's own version `v_b`; 0 where it is
    unknown (< 0) or not older than `version`, the trainer's.
    """
    age = version - versions.to(behaviour.dtype)
    known = (versions >= 0) & (age > 0)
    alpha = torch.where(known, ((age - 1) / age.clamp(min=1)).clamp(0, 1), torch.zeros_like(age))
    return behaviour + alpha * (logprobs.detach() - behaviour)
