"""The policy objective of the PPO family on packed, token-aligned tensors; presets only choose its settings.

    ratio  = pi_theta / pi_prox                     per token, or per sequence (GSPO)
    pg     = max(-A ratio, -A clip(ratio))          dual clip where A < 0
    loss   = aggregate(pg w, kept tokens)           w = pi_prox / pi_b (decoupled PPO, Hilton et al. 2022)

Denominators are those of the global minibatch, so the losses of micro-batches and ranks simply add up.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.kl import kl_estimate
from pekoe.pipeline.algorithm.ratios import loglinear_logprobs, policy_ratio
from pekoe.pipeline.algorithm.rejection import behaviour_weights, check_rejection
from pekoe.pipeline.algorithm.segments import segment_mean, segment_sum, sequence_index
from pekoe.pipeline.config.actor import ActorConfig

Batch = Mapping[str, Tensor]

WIDE_GAP = 0.1
"""Tokens whose log-prob by the trainer is off the engine's by more are counted."""


class PolicyObjective:
    """The loss of one minibatch of a step; implements the trainer's `LossFunction`.

    `num_active` and `num_sequences` are the numbers of active tokens and of sequences of the whole minibatch over
    all ranks (without truncated sequences when `mask_truncated`), taken before any rejection. `version` is the
    step's: weights before the update. Reads from a batch: `cu_seqlens`, `loss_mask`, `logprobs` (behaviour),
    `versions`, `truncated`, `advantages` [M], and `prox_logprobs` [M] where the method is `recompute` or `metrics`.
    """

    def __init__(
        self, config: ActorConfig, *, num_active: int, num_sequences: int, max_new_tokens: int, version: int
    ) -> None:
        check_objective(config)
        self._config = config
        self._version = version
        self._num_active = max(num_active, 1)
        self._num_sequences = max(num_sequences, 1)
        self._max_new_tokens = max_new_tokens
        self.needs_entropy_gradient = config.entropy_coef > 0

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the loss, and sums of statistics (keys that end in `_max` are maxima)."""
        config = self._config
        num_sequences = len(batch["cu_seqlens"]) - 1
        index = sequence_index(batch["cu_seqlens"])
        mask = active_mask(batch, index, config.mask_truncated)
        behaviour = batch["logprobs"].to(logprobs.dtype)
        prox = self._proximal(logprobs, behaviour, batch)
        weight, keep = torch.ones_like(logprobs), mask
        if config.use_decoupled_loss:
            bounds = config.rejection_sampling
            weight, keep = behaviour_weights(prox, behaviour, mask, index, num_sequences, bounds)
        advantages = batch["advantages"].to(logprobs.dtype)
        level = config.importance_sampling_level
        ratio, advantages = policy_ratio(logprobs, prox, advantages, mask, index, num_sequences, level)
        pg, clipped, dual_clipped = clipped_objective(
            ratio, advantages, config.eps_clip, config.eps_clip_higher, config.c_clip
        )
        loss = self._aggregate(pg * weight, keep, mask, index, num_sequences)
        if entropy is not None and self.needs_entropy_gradient:
            loss = loss - config.entropy_coef * self._aggregate(entropy, mask, mask, index, num_sequences)
        with torch.no_grad():
            stats = self._statistics(logprobs, entropy, prox, ratio, weight, mask, keep, batch)
            stats["loss"] = loss.detach()
            stats["clipped"] = (clipped & keep).sum()
            stats["dual_clipped"] = (dual_clipped & keep).sum()
            stats["sequences"] = (segment_sum(mask.to(torch.int64), index, num_sequences) > 0).sum()
            stats["advantage"] = torch.where(mask, advantages, 0).sum()
        return loss, {name: value.detach().to(torch.float64) for name, value in stats.items()}

    def _proximal(self, logprobs: Tensor, behaviour: Tensor, batch: Batch) -> Tensor:
        """Log-probs [M], without gradient, that the ratio is taken against."""
        if not self._config.use_decoupled_loss:
            return behaviour
        method = self._config.prox_logp_method
        if method == "reuse":
            return logprobs.detach()
        if method == "loglinear":
            return loglinear_logprobs(logprobs, behaviour, batch["versions"], self._version)
        return batch["prox_logprobs"].to(logprobs.dtype)

    def _aggregate(self, values: Tensor, keep: Tensor, mask: Tensor, index: Tensor, num_sequences: int) -> Tensor:
        """This micro-batch's share; rejected tokens leave the numerator only."""
        kept = torch.where(keep, values, torch.zeros_like(values))
        how = self._config.loss_aggregation
        if how == "token_mean":
            return kept.sum() / self._num_active
        if how == "constant":
            return kept.sum() / (self._num_sequences * self._max_new_tokens)
        return segment_mean(kept, mask, index, num_sequences).sum() / self._num_sequences

    def _statistics(
        self, logprobs: Tensor, entropy: Tensor | None, prox: Tensor, ratio: Tensor, weight: Tensor, mask: Tensor,
        keep: Tensor, batch: Batch,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Sums over the active tokens; divide by `tokens` for means."""
        behaviour = batch["logprobs"].to(logprobs.dtype)
        gap = torch.where(mask, logprobs - behaviour, 0).abs()
        age = torch.where(mask, self._version - batch["versions"], 0)
        stats = {
            "tokens": mask.sum(),
            "ratio": torch.where(mask, ratio, 0).sum(),
            "ratio_max": _maximum(torch.where(mask, ratio, 0)),
            "rejected": (mask & ~keep).sum(),
            "behaviour_weight": torch.where(mask, weight, 0).sum(),
            "behaviour_weight_max": _maximum(torch.where(mask, weight, 0)),
            "kl_prox": kl_estimate("k3", prox, logprobs, mask).sum(),
            "kl_behaviour": kl_estimate("k3", behaviour, logprobs, mask).sum(),
            "logprob_gap": gap.sum(),
            "logprob_gap_max": _maximum(gap),
            "staleness": age.sum(),
            "staleness_max": _maximum(age),
        }
        if entropy is not None:
            stats["entropy"] = torch.where(mask, entropy, 0).sum()
        stats |= self._fresh_gap(logprobs, prox, behaviour, mask, batch["versions"])
        if self._config.prox_logp_method == "metrics" and self._config.use_decoupled_loss:
            loglinear = loglinear_logprobs(logprobs, behaviour, batch["versions"], self._version)
            stats["prox_error_loglinear"] = torch.where(mask, loglinear - prox, 0).abs().sum()
            stats["prox_error_reuse"] = torch.where(mask, logprobs - prox, 0).abs().sum()
        return stats

    def _fresh_gap(
        self, logprobs: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor, versions: Tensor
    ) -> dict[str, Tensor]:
        """Trainer against engine on the tokens that this step's version has sampled: with recomputed proximal log-probs
        exact in every minibatch, else in the first."""
        trainer = prox if needs_prox_forward(self._config) else logprobs
        fresh = mask & (versions == self._version)
        gap = torch.where(fresh, trainer - behaviour, 0)
        return {
            "fresh_tokens": fresh.sum(),
            "fresh_gap": gap.abs().sum(),
            "fresh_drift": gap.sum(),
            "fresh_wide": (gap.abs() > WIDE_GAP).sum(),
            "fresh_gap_max": _maximum(gap.abs()),
        }


def check_objective(config: ActorConfig) -> None:
    """Raises ValueError for settings that contradict each other; warns where the behaviour weight is unbounded."""
    if config.eps_clip is None and config.eps_clip_higher is not None:
        raise ValueError(f"actor.eps_clip: null is not allowed with eps_clip_higher {config.eps_clip_higher}")
    if config.c_clip is not None and not config.c_clip > 1:
        raise ValueError(f"actor.c_clip: {config.c_clip} is not allowed; must be > 1")
    if config.use_decoupled_loss and config.rejection_sampling is not None:
        check_rejection(config.rejection_sampling)
    if config.use_decoupled_loss and config.rejection_sampling is None:
        warnings.warn("actor.rejection_sampling is null: the behaviour weight is used unbounded", stacklevel=3)


def active_mask(batch: Batch, index: Tensor, mask_truncated: bool) -> Tensor:
    """[M] bool: tokens that train."""
    mask = batch["loss_mask"].to(torch.bool)
    if mask_truncated:
        mask = mask & ~batch["truncated"].to(torch.bool)[index]
    return mask


def needs_prox_forward(config: ActorConfig) -> bool:
    """Whether a step begins with a forward pass that fills `prox_logprobs`."""
    return config.use_decoupled_loss and config.prox_logp_method in ("recompute", "metrics")


def clipped_objective(
    ratio: Tensor, advantages: Tensor, eps_clip: float | None, eps_clip_higher: float | None, c_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, clipped, dual clipped) per token: `max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_higher))`, and where A
    < 0 at most `|A| c_clip`. `eps_clip` null clips nothing; `eps_clip_higher` null is `eps_clip`."""
    pg = -advantages * ratio
    clipped = torch.zeros_like(pg, dtype=torch.bool)
    if eps_clip is not None:
        higher = eps_clip if eps_clip_higher is None else eps_clip_higher
        bounded = -advantages * ratio.clamp(1 - eps_clip, 1 + higher)
        clipped = bounded > pg
        pg = torch.maximum(pg, bounded)
    dual = torch.zeros_like(clipped)
    if c_clip is not None:
        ceiling = advantages.abs() * c_clip
        dual = (advantages < 0) & (pg > ceiling)
        pg = torch.where(dual, ceiling, pg)
    return pg, clipped, dual


def _maximum(values: Tensor) -> Tensor:
    return values.max() if values.numel() else torch.zeros((), dtype=values.dtype, device=values.device)
