"""Statistics of a policy update: sums over tokens, so that ratios of sums are the same however a minibatch is cut.

The names are the same for all objectives: divide by `tokens` for means over active tokens. Keys that end in `_max` are
maxima. `fresh_…` compare trainer and engine on the tokens that the step's own version has sampled.

Legend: M tokens of a micro-batch laid end to end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.kl import kl_estimate, log_ratio
from pekoe.pipeline.algorithm.policy_terms import PolicyTerms
from pekoe.pipeline.algorithm.ratios import loglinear_logprobs, policy_ratio
from pekoe.pipeline.algorithm.segments import segment_sum

WIDE_GAP = 0.1
"""Tokens whose log-prob by the trainer is off the engine's by more are counted."""


def policy_statistics(terms: PolicyTerms, weight: Tensor, version: int) -> dict[str, Tensor]:
    """What every objective has; `weight` [M] is the behaviour weight.

    `sequences` have at least one active token; `staleness` is `version`, the step's, minus the token's; the KLs are k3
    estimates of KL(that policy ‖ the optimised one).
    """
    mask = terms.mask
    ratio, advantages = policy_ratio(terms)
    ratio, weight = torch.where(mask, ratio, 0), torch.where(mask, weight, 0)
    gap = log_ratio(terms.logprobs, terms.behaviour, mask)
    age = torch.where(mask, version - terms.batch["versions"], 0)
    active = segment_sum(mask.to(torch.int64), terms.index, terms.num_sequences)
    return {
        "tokens": mask.sum(),
        "sequences": (active > 0).sum(),
        "advantage": torch.where(mask, advantages, 0).sum(),
        "ratio": ratio.sum(),
        "ratio_max": maximum(ratio),
        "behaviour_weight": weight.sum(),
        "behaviour_weight_max": maximum(weight),
        "kl_prox": kl_estimate("k3", terms.prox, terms.logprobs, mask).sum(),
        "kl_behaviour": kl_estimate("k3", terms.behaviour, terms.logprobs, mask).sum(),
        "logprob_gap": gap.abs().sum(),
        "logprob_gap_max": maximum(gap.abs()),
        "staleness": age.sum(),
        "staleness_max": maximum(age),
    }


def fresh_gap(trainer: Tensor, terms: PolicyTerms, version: int) -> dict[str, Tensor]:
    """Log-probs [M] by the trainer against the engine's, on the active tokens that `version` has sampled."""
    fresh = terms.mask & (terms.batch["versions"] == version)
    gap = log_ratio(trainer, terms.behaviour, fresh)
    return {
        "fresh_tokens": fresh.sum(),
        "fresh_gap": gap.abs().sum(),
        "fresh_drift": gap.sum(),
        "fresh_wide": (gap.abs() > WIDE_GAP).sum(),
        "fresh_gap_max": maximum(gap.abs()),
    }


def proximal_errors(terms: PolicyTerms, version: int) -> dict[str, Tensor]:
    """How far the approximations of the proximal log-probs are off the recomputed ones, in nats."""
    loglinear = loglinear_logprobs(terms.logprobs, terms.behaviour, terms.batch["versions"], version)
    return {
        "prox_error_loglinear": log_ratio(loglinear, terms.prox, terms.mask).abs().sum(),
        "prox_error_reuse": log_ratio(terms.logprobs, terms.prox, terms.mask).abs().sum(),
    }


def maximum(values: Tensor) -> Tensor:
    """The largest of `values`, 0 of none."""
    return values.max() if values.numel() else torch.zeros((), dtype=values.dtype, device=values.device)
