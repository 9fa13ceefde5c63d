"""The behaviour weight `w = pi_prox / pi_b` of the decoupled objective, and what happens to tokens where it is out of
bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.kl import kl_estimate, log_ratio, safe_exp
from pekoe.pipeline.algorithm.segments import segment_max, segment_mean, segment_sum
from pekoe.pipeline.config.actor import RejectionConfig

PROBABILITY_FLOOR = 1e-8


def check_rejection(config: RejectionConfig) -> None:
    """Raises ValueError for a combination that has no meaning."""
    if config.action == "clamp" and config.metric != "ratio":
        raise ValueError(f"rejection_sampling.metric: {config.metric!r} is not allowed with action clamp; only ratio")
    if config.upper is None and config.lower is None:
        raise ValueError("rejection_sampling: upper and lower are both null; set one, or rejection_sampling: null")
    if config.upper is not None and config.lower is not None and config.lower > config.upper:
        raise ValueError(f"rejection_sampling.lower: {config.lower} is above upper {config.upper}")


def behaviour_weights(
    prox: Tensor, behaviour: Tensor, mask: Tensor, index: Tensor, num_sequences: int, config: RejectionConfig | None
) -> tuple[Tensor, Tensor]:
    """(weight [M], keep [M] bool): the factor on the policy gradient, and which active tokens stay in the numerator.

    `prox` and `behaviour` are log-probs [M] without gradient. Bounds are inclusive. Sequence level judges the
    aggregate over a sequence's active tokens; with the metric `ratio` it aggregates in log space and all its tokens
    get the geometric mean weight. Without a `config` the weight is unbounded and everything is kept.
    """
    lr = log_ratio(prox, behaviour, mask)
    weight = safe_exp(lr)
    if config is None:
        return weight, mask
    check_rejection(config)
    if config.level == "token":
        inside = _within(
            weight if config.metric == "ratio" else _divergence(config.metric, prox, behaviour, mask), config
        )
    else:
        measured = lr if config.metric == "ratio" else _divergence(config.metric, prox, behaviour, mask)
        judged = _aggregate(measured, mask, index, num_sequences, config.agg)
        if config.metric == "ratio":
            weight = safe_exp(segment_mean(lr, mask, index, num_sequences))[index]
            judged = safe_exp(judged)
        inside = _within(judged, config)[index]
    if config.action == "clamp":
        return torch.where(inside, weight, weight.clamp(min=config.lower or 0.0, max=config.upper)), mask
    return weight, mask & inside


def binary_kl(prox: Tensor, behaviour: Tensor) -> Tensor:
    """`max(KL(p ‖ q), KL(q ‖ p))` of Bernoulli distributions with the token's probabilities under both policies [M], in
    float64: below it a probability near 1 cannot be told from 1."""
    p = torch.exp(prox.double()).clamp(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    q = torch.exp(behaviour.double()).clamp(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    return torch.maximum(_bernoulli_kl(p, q), _bernoulli_kl(q, p))


def _bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


def _divergence(metric: str, prox: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    if metric == "binary_kl":
        zero = torch.zeros_like(prox)
        return binary_kl(torch.where(mask, prox, zero), torch.where(mask, behaviour, zero))
    return kl_estimate(metric.removeprefix("kl_"), prox, behaviour, mask)


def _aggregate(values: Tensor, mask: Tensor, index: Tensor, num_sequences: int, how: str) -> Tensor:
    if how == "mean":
        return segment_mean(values, mask, index, num_sequences)
    if how == "sum":
        return segment_sum(torch.where(mask, values, torch.zeros_like(values)), index, num_sequences)
    return segment_max(values, mask, index, num_sequences)


def _within(values: Tensor, config: RejectionConfig) -> Tensor:
    """Inclusive bounds, with room for the rounding of one exponential."""
    room = 4 * torch.finfo(values.dtype).eps
    inside = torch.ones_like(values, dtype=torch.bool)
    if config.upper is not None:
        inside &= values <= config.upper + abs(config.upper) * room
    if config.lower is not None:
        inside &= values >= config.lower - abs(config.lower) * room
    return inside
