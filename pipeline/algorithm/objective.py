"""The loss of a policy update on packed, token-aligned tensors; presets only choose its settings.

    pg   = objective(logprobs, prox, advantages)              token losses: ppo, sapo, cispo, or a user's
    L_RL = aggregate(pg w, kept) - c_e aggregate(entropy) + c_k aggregate(KL(pi ‖ ref))
    loss = w_rl L_RL + w_d sum m exp(logpi - logpi_b) sg(logpi - logpi_teacher) / N          with a teacher, else L_RL

w = pi_prox / pi_b (decoupled PPO, Hilton et al. 2022); tokens that are rejected or dropped (M2PO) leave the numerator
only. Denominators are those of the global minibatch, so the losses of micro-batches and ranks simply add up.

Legend: M tokens of a micro-batch laid end to end.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.aggregation import Aggregation
from pekoe.pipeline.algorithm.kl import kl_estimate, log_ratio, safe_exp
from pekoe.pipeline.algorithm.policy_statistics import fresh_gap, policy_statistics, proximal_errors
from pekoe.pipeline.algorithm.policy_terms import Batch, Objective, PolicyTerms
from pekoe.pipeline.algorithm.ratios import loglinear_logprobs
from pekoe.pipeline.algorithm.rejection import behaviour_weights, check_rejection
from pekoe.pipeline.algorithm.segments import sequence_index
from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.config.companions import TeacherConfig
from pekoe.pipeline.registry import OBJECTIVES, resolve

CLIPS = ("clipped_lower", "clipped_higher", "dual_clipped")
"""Counted for every objective, 0 where it has no such bound."""


class PolicyObjective:
    """The loss of one minibatch of a step; implements the trainer's `LossFunction`.

    `num_active` and `num_sequences` are the numbers of active tokens and of sequences of the whole minibatch over
    all ranks (without truncated sequences when `mask_truncated`), taken before any rejection. `version` is the
    step's: weights before the update. With a `teacher` its term is added, and `rl_loss_weight` 0 leaves it alone.

    Reads from a batch: `cu_seqlens`, `loss_mask`, `logprobs` (behaviour), `versions`, `truncated`, `advantages` [M];
    `prox_logprobs` [M] where `needs_prox_forward`, `m2_keep` [M] where `m2_threshold` is set, `teacher_logprobs` [M]
    with a teacher, `ref_logprobs` [M] where there is a reference policy.
    """

    def __init__(
        self, config: ActorConfig, *, num_active: int, num_sequences: int, max_new_tokens: int, version: int,
        teacher: TeacherConfig | None = None,
    ) -> None:  # fmt: skip
        check_objective(config)
        self._config = config
        self._teacher = teacher
        self._version = version
        self._objective: Objective = resolve(OBJECTIVES, config.objective, "actor.objective")
        self._num_active = max(num_active, 1)
        self._aggregate = Aggregation(config.loss_aggregation, num_active, num_sequences, max_new_tokens)
        self._has_policy_loss = teacher is None or teacher.rl_loss_weight > 0
        self.needs_entropy_gradient = config.entropy_coef > 0 and self._has_policy_loss

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the loss, and sums of statistics (keys that end in `_max` are maxima)."""
        terms = self._terms(logprobs, batch)
        weight, keep, stats = self._kept(terms)
        entropy = None if entropy is None else torch.where(terms.mask, entropy, torch.zeros_like(entropy))
        shares = []
        if self._has_policy_loss:
            token_loss = self._objective(terms)
            share = self._policy_loss(terms, token_loss.values * weight, keep, entropy)
            shares.append(share if self._teacher is None else self._teacher.rl_loss_weight * share)
            stats |= {name: (counted & keep).sum() for name, counted in token_loss.stats.items()}
        if self._teacher is not None:
            distilled = distillation_loss(terms, _given(terms, "teacher_logprobs")).sum() / self._num_active
            shares.append(self._teacher.distill_loss_weight * distilled)
        loss = torch.stack(shares).sum()
        with torch.no_grad():
            stats = self._statistics(terms, weight, entropy) | stats
            stats["loss"] = loss.detach()
        return loss, {name: value.detach().to(torch.float64) for name, value in stats.items()}

    def _terms(self, logprobs: Tensor, batch: Batch) -> PolicyTerms:
        """All arrays in the dtype of `logprobs`, and exactly 0 on tokens that do not train."""
        index = sequence_index(batch["cu_seqlens"])
        mask = active_mask(batch, index, self._config.mask_truncated)

        def active(values: Tensor) -> Tensor:
            return torch.where(mask, values.to(logprobs.dtype), torch.zeros_like(logprobs))

        behaviour, own = active(batch["logprobs"]), active(logprobs)
        prox = active(self._proximal(own, behaviour, batch))
        advantages = active(batch["advantages"]) if self._has_policy_loss else torch.zeros_like(behaviour)
        num_sequences = len(batch["cu_seqlens"]) - 1
        return PolicyTerms(own, prox, behaviour, advantages, mask, index, num_sequences, self._config, batch)

    def _proximal(self, logprobs: Tensor, behaviour: Tensor, batch: Batch) -> Tensor:
        """Log-probs [M], without gradient, that the ratio is taken against."""
        if not self._config.use_decoupled_loss:
            return behaviour
        method = self._config.prox_logp_method
        if method == "loglinear":
            return loglinear_logprobs(logprobs, behaviour, batch["versions"], self._version)
        if method == "reuse" or not (needs_prox_forward(self._config) or "prox_logprobs" in batch):
            return logprobs.detach()
        return batch["prox_logprobs"]

    def _kept(self, terms: PolicyTerms) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(behaviour weight [M], tokens [M] bool that stay in the numerator, statistics)."""
        config, mask = self._config, terms.mask
        weight, keep = torch.ones_like(terms.behaviour), mask
        if config.use_decoupled_loss:
            weight, keep = behaviour_weights(
                terms.prox, terms.behaviour, mask, terms.index, terms.num_sequences, config.rejection_sampling
            )
        stats = {name: torch.zeros_like(mask).sum() for name in CLIPS} | {"rejected": (mask & ~keep).sum()}
        if config.m2_threshold is not None:
            inside = terms.batch["m2_keep"].to(torch.bool)
            stats["m2_dropped"] = (mask & ~inside).sum()
            keep = keep & inside
        return weight, keep, stats

    def _policy_loss(self, terms: PolicyTerms, pg: Tensor, keep: Tensor, entropy: Tensor | None) -> Tensor:
        """L_RL: token losses, entropy bonus and KL to the reference, in the same aggregation."""
        config, where = self._config, (terms.mask, terms.index, terms.num_sequences)
        loss = self._aggregate(pg, keep, *where)
        if config.entropy_coef > 0 and entropy is not None:
            loss = loss - config.entropy_coef * self._aggregate(entropy, terms.mask, *where)
        if config.kl_loss_coef > 0:
            kl = kl_estimate(config.kl_loss_estimator, terms.logprobs, _given(terms, "ref_logprobs"), terms.mask)
            loss = loss + config.kl_loss_coef * self._aggregate(kl, terms.mask, *where)
        return loss

    def _statistics(self, terms: PolicyTerms, weight: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
        """Sums over the active tokens; divide by `tokens` for means."""
        config = self._config
        stats = policy_statistics(terms, weight, self._version)
        # With recomputed proximal log-probs exact in every minibatch, else in the first.
        stats |= fresh_gap(terms.prox if is_recomputed(config) else terms.logprobs, terms, self._version)
        if entropy is not None:
            stats["entropy"] = entropy.sum()
        if config.use_decoupled_loss and config.prox_logp_method == "metrics":
            stats |= proximal_errors(terms, self._version)
        if "ref_logprobs" in terms.batch:
            stats["kl_ref"] = kl_estimate("k3", terms.logprobs, _given(terms, "ref_logprobs"), terms.mask).sum()
        if self._teacher is not None:
            stats["teacher_kl"] = log_ratio(terms.logprobs, _given(terms, "teacher_logprobs"), terms.mask).sum()
        return stats


def distillation_loss(terms: PolicyTerms, teacher: Tensor) -> Tensor:
    """[M] `exp(logpi - logpi_b) sg(logpi - logpi_teacher)` on active tokens: the expected gradient over tokens of the
    behaviour policy is that of KL(pi ‖ teacher), by the weight, which is differentiable."""
    gap = log_ratio(terms.logprobs, teacher, terms.mask).detach()
    return safe_exp(log_ratio(terms.logprobs, terms.behaviour, terms.mask)) * gap


def _given(terms: PolicyTerms, name: str) -> Tensor:
    """[M] log-probs of another model, in the dtype of the policy's; a micro-batch without active tokens may lack
    them."""
    if name in terms.batch:
        return terms.batch[name].to(terms.logprobs.dtype)
    if terms.mask.any():
        raise ValueError(f"batch: {name} is missing, which the objective reads (a ref or teacher section gives it)")
    return torch.zeros_like(terms.behaviour)


def check_objective(config: ActorConfig) -> None:
    """Raises ValueError for settings that contradict each other; warns where the behaviour weight is unbounded."""
    if config.eps_clip is None and config.eps_clip_higher is not None:
        raise ValueError(f"actor.eps_clip: null is not allowed with eps_clip_higher {config.eps_clip_higher}")
    if config.c_clip is not None and not config.c_clip > 1:
        raise ValueError(f"actor.c_clip: {config.c_clip} is not allowed; must be > 1")
    if config.objective == "cispo" and config.eps_clip_higher is None:
        raise ValueError("actor.eps_clip_higher: null is not allowed with objective cispo")
    if config.objective == "sapo" and config.use_decoupled_loss:
        raise ValueError("actor.use_decoupled_loss: true is not allowed with objective sapo")
    if config.kl_loss_coef > 0 and config.kl_loss_estimator not in ("k2", "k3"):
        raise ValueError(
            f"actor.kl_loss_estimator: {config.kl_loss_estimator!r} is not allowed; k2 or k3 (the gradient of k1 "
            "carries no signal)"
        )
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
    """Whether a step begins with a forward pass that fills `prox_logprobs`.

    Not for `recompute` where the step's only update sees the very same weights (one minibatch, one epoch, no dropout)
    and nothing reads them before it: the proximal log-probs are then the objective's own, detached.
    """
    if config.m2_threshold is not None:
        return True
    if not is_recomputed(config):
        return False
    only_update = config.ppo_n_minibatches == 1 and config.ppo_epochs == 1 and config.disable_dropout
    return config.prox_logp_method == "metrics" or not only_update or config.kl_ctl > 0


def is_recomputed(config: ActorConfig) -> bool:
    """Whether ratios are taken against the weights at the start of the step."""
    return config.use_decoupled_loss and config.prox_logp_method in ("recompute", "metrics")
