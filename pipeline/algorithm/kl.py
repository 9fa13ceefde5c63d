"""Estimators of the KL divergence from log-probs of sampled tokens. Source: Schulman, "Approximating KL divergence"
(2020)."""

from __future__ import annotations

import torch
from torch import Tensor

EXP_LIMIT = 20.0
"""Above this the exponential goes on as its tangent: value and gradient stay finite in bfloat16 and keep their sign."""

REWARD_LIMIT = 10.0


def safe_exp(x: Tensor) -> Tensor:
    """exp(x), continued linearly above `EXP_LIMIT`."""
    return torch.exp(x.clamp(max=EXP_LIMIT)) * (1 + torch.relu(x - EXP_LIMIT))


def log_ratio(logprobs: Tensor, base: Tensor, mask: Tensor) -> Tensor:
    """`logprobs - base` where `mask` is true, exactly 0 elsewhere: nothing of a masked token, NaN included, gets
    through."""
    active = mask.to(torch.bool)
    return torch.where(active, logprobs, 0) - torch.where(active, base, 0)


def kl_estimate(kind: str, logprobs: Tensor, base: Tensor, mask: Tensor) -> Tensor:
    """[M] estimates with `lr = logprobs - base`: k1 `lr`, k2 `lr²/2`, k3 `exp(-lr) - 1 + lr`; 0 where `mask` is 0.

    k1 and k3 are unbiased for KL(policy of `logprobs` ‖ policy of `base`) when the first one sampled the tokens; as
    a loss, k2 has the right expected gradient, k3's is that of the reverse direction, and k1's carries no signal.
    """
    lr = log_ratio(logprobs, base, mask)
    if kind == "k1":
        return lr
    if kind == "k2":
        return lr.square() / 2
    if kind == "k3":
        return safe_exp(-lr) - 1 + lr
    raise ValueError(f"KL estimator: {kind!r} is not allowed; one of k1, k2, k3")


def kl_reward(kind: str, logprobs: Tensor, base: Tensor, mask: Tensor) -> Tensor:
    """`kl_estimate` clamped to ±10: what is subtracted (times its coefficient) from token rewards."""
    return kl_estimate(kind, logprobs, base, mask).clamp(-REWARD_LIMIT, REWARD_LIMIT)
