"""What keys ask of each other; `check.py` runs these when every single value is legal."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from pekoe.pipeline import registry
from pekoe.pipeline.config.cluster_checks import CLUSTER_CHECKS, check_nodes
from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.config.durations import FORMS, duration_seconds
from pekoe.pipeline.config.engine_checks import SAMPLING_CHECKS, check_engine
from pekoe.pipeline.config.findings import Findings, PlacementFacts
from pekoe.pipeline.config.generation import GenerationConfig
from pekoe.pipeline.config.run import RunConfig

POLLS_PER_LEASE = 8
"""Looks at the files within a lease, at least."""
LONGEST_HEARTBEAT_SECONDS = 5.0
"""A rank that was not heard for 15 s is called silent by whoever looks at the run directory."""


def _check_names(config: RunConfig, findings: Findings) -> None:
    for key in ("experiment_name", "trial_name"):
        name = getattr(config, key)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            allowed = "letters, digits, '.', '_', '-', beginning with a letter or digit (it names a folder)"
            findings.wrong(key, name, f"is not allowed; allowed: {allowed}")
    sections = [("train_dataset.type", config.train_dataset.type, registry.DATASETS)]
    if config.valid_dataset is not None:
        sections.append(("valid_dataset.type", config.valid_dataset.type, registry.DATASETS))
    sections.append(("workflow.name", config.workflow.name, registry.WORKFLOWS))
    sections.append(("reward.name", config.reward.name, registry.REWARDS))
    for key, name, table in sections:
        if name not in table and not re.fullmatch(r"[\w.]+:\w+", name):
            near = difflib.get_close_matches(name, table, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            findings.wrong(key, name, f"is not known{hint}; allowed: {', '.join(sorted(table))}, or module:attribute")


def _check_sampling(config: RunConfig, findings: Findings) -> None:
    for name in ("gconfig", "eval_gconfig"):
        sampling: GenerationConfig | None = getattr(config, name)
        if sampling is not None and sampling.min_new_tokens > sampling.max_new_tokens:
            bound = f"<= {name}.max_new_tokens ({sampling.max_new_tokens})"
            findings.wrong(f"{name}.min_new_tokens", sampling.min_new_tokens, f"is not allowed; allowed: {bound}")
    training = config.gconfig
    longest = config.train_dataset.max_length
    if (
        training.max_tokens is not None
        and longest is not None
        and longest + training.max_new_tokens > training.max_tokens
    ):
        findings.warn(
            "gconfig.max_tokens",
            training.max_tokens,
            f"cuts completions of the longest prompts ({longest} + {training.max_new_tokens} tokens)",
        )
    if training.greedy:
        findings.warn("gconfig.greedy", True, "gives a group equal completions: nothing is learned from it")


def _check_objective(config: RunConfig, findings: Findings) -> None:
    actor = config.actor
    if actor.eps_clip is None and actor.eps_clip_higher is not None:
        findings.wrong(
            "actor.eps_clip_higher", actor.eps_clip_higher, "needs actor.eps_clip; allowed: null when that is null"
        )
    if actor.optimizer.beta1 >= 1 or actor.optimizer.beta2 >= 1:
        name = "beta1" if actor.optimizer.beta1 >= 1 else "beta2"
        findings.wrong(f"actor.optimizer.{name}", getattr(actor.optimizer, name), "is not allowed; allowed: < 1")
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(actor, name)
        if norm is not None and norm.mean_leave1out and norm.mean_level is None:
            findings.wrong(
                f"actor.{name}.mean_leave1out",
                True,
                f"needs a mean; allowed: false when actor.{name}.mean_level is null",
            )
    norm = actor.reward_norm
    if norm is not None and norm.mean_level == "group" and config.gconfig.n_samples < 2:
        findings.wrong(
            "gconfig.n_samples",
            config.gconfig.n_samples,
            "makes every advantage 0 with actor.reward_norm.mean_level group; allowed: >= 2",
        )
    if actor.importance_sampling_level == "sequence" and actor.loss_aggregation == "token_mean":
        findings.warn(
            "actor.loss_aggregation",
            "token_mean",
            "weighs long sequences more under importance_sampling_level sequence (GSPO: sequence_mean)",
        )
    if not actor.use_decoupled_loss and actor.prox_logp_method != "recompute":
        findings.warn(
            "actor.prox_logp_method", actor.prox_logp_method, "has no effect without actor.use_decoupled_loss"
        )


def _check_rejection(config: RunConfig, findings: Findings) -> None:
    actor, key = config.actor, "actor.rejection_sampling"
    bounds = actor.rejection_sampling
    if bounds is None:
        if actor.use_decoupled_loss:
            findings.warn(key, None, "leaves the behaviour weight of the decoupled objective unbounded")
        return
    if not actor.use_decoupled_loss:
        findings.warn(f"{key}.metric", bounds.metric, "has no effect without actor.use_decoupled_loss")
    if bounds.upper is None and bounds.lower is None:
        findings.wrong(
            f"{key}.upper", None, f"and lower null bound nothing; allowed: a number for one of them, or {key}: null"
        )
    if bounds.upper is not None and bounds.lower is not None and bounds.lower > bounds.upper:
        findings.wrong(f"{key}.lower", bounds.lower, f"is above upper; allowed: <= {bounds.upper}")
    if bounds.action == "clamp" and bounds.metric != "ratio":
        findings.wrong(
            f"{key}.action", "clamp", f"is not allowed with metric {bounds.metric}; allowed: mask, or metric ratio"
        )
    neutral = 1.0 if bounds.metric == "ratio" else 0.0
    if bounds.upper is not None and bounds.upper < neutral:
        findings.wrong(
            f"{key}.upper",
            bounds.upper,
            f"drops tokens of equal policies ({bounds.metric} {neutral:g}); allowed: >= {neutral:g}",
        )
    if bounds.lower is not None and bounds.lower > neutral:
        findings.wrong(
            f"{key}.lower",
            bounds.lower,
            f"drops tokens of equal policies ({bounds.metric} {neutral:g}); allowed: <= {neutral:g}",
        )
    if bounds.level == "token" and bounds.agg != "mean":
        findings.warn(f"{key}.agg", bounds.agg, "has no effect at level token")


def _check_batch(config: RunConfig, findings: Findings) -> None:
    sequences = config.train_dataset.batch_size * config.gconfig.n_samples
    size = (
        f"train_dataset.batch_size x gconfig.n_samples ({config.train_dataset.batch_size} x {config.gconfig.n_samples})"
    )
    spec = config.actor.mb_spec
    if config.actor.ppo_n_minibatches > sequences // spec.granularity:
        allowed = f"<= {sequences // spec.granularity} = {size}" + (
            f" / granularity {spec.granularity}" if spec.granularity > 1 else ""
        )
        findings.wrong("actor.ppo_n_minibatches", config.actor.ppo_n_minibatches, f"is not allowed; allowed: {allowed}")
    if config.gconfig.n_samples % spec.granularity:
        findings.wrong(
            "actor.mb_spec.granularity",
            spec.granularity,
            f"is not allowed; allowed: a divisor of gconfig.n_samples ({config.gconfig.n_samples})",
        )
    if config.actor.mask_truncated and spec.granularity > 1:
        findings.wrong(
            "actor.mask_truncated",
            True,
            f"is not allowed with actor.mb_spec.granularity {spec.granularity}: rows that stay together would be torn; "
            "allowed: false, or granularity 1",
        )
    if config.valid_dataset is not None:
        for name in ("batch_size", "shuffle"):
            value = getattr(config.valid_dataset, name)
            if value != getattr(DatasetConfig(), name):
                findings.warn(f"valid_dataset.{name}", value, "has no effect: every example is taken once")
    if spec.max_sequences_per_mb is not None and spec.max_sequences_per_mb < spec.granularity:
        findings.wrong(
            "actor.mb_spec.max_sequences_per_mb",
            spec.max_sequences_per_mb,
            f"is not allowed; allowed: >= granularity ({spec.granularity}), or null",
        )


def _check_rollout(config: RunConfig, findings: Findings) -> None:
    rollout, reward = config.rollout, config.reward
    if rollout.deterministic and rollout.max_head_offpolicyness != 0:
        findings.wrong(
            "rollout.max_head_offpolicyness",
            rollout.max_head_offpolicyness,
            "is not allowed with rollout.deterministic; allowed: 0",
        )
    longest = rollout.episode_seconds * (1 + rollout.episode_retries)
    if longest >= config.cluster.progress_seconds:
        findings.warn(
            "cluster.progress_seconds", config.cluster.progress_seconds,
            f"ends the run before an episode's time limit does (rollout.episode_seconds {rollout.episode_seconds:g}, "
            f"tried {1 + rollout.episode_retries} times)",
        )  # fmt: skip
    if reward.timeout_seconds >= rollout.episode_seconds:
        findings.warn(
            "reward.timeout_seconds",
            reward.timeout_seconds,
            f"is not below rollout.episode_seconds ({rollout.episode_seconds:g})",
        )


def _check_evaluation(config: RunConfig, findings: Findings) -> None:
    asked = {
        "evaluator.freq_steps": config.evaluator.freq_steps,
        "evaluator.at_start": config.evaluator.at_start,
        "evaluator.at_end": config.evaluator.at_end,
    }
    if config.valid_dataset is None:
        for key, value in asked.items():
            if value:
                allowed = "null" if value is not True else "false"
                findings.wrong(key, value, f"needs a valid_dataset; allowed without one: {allowed}")
    elif not any(asked.values()):
        findings.warn(
            "valid_dataset.type",
            config.valid_dataset.type,
            "is never used: set evaluator.freq_steps, at_start or at_end",
        )


def check_placement(config: RunConfig, placement: PlacementFacts, findings: Findings) -> None:
    check_nodes(config, placement, findings)
    check_engine(config, placement, findings)
    per_update = config.train_dataset.batch_size * config.gconfig.n_samples // config.actor.ppo_n_minibatches
    trainers = len(placement.trainer_ranks)
    if trainers > per_update:
        findings.warn(
            "allocation",
            str(placement),
            f"has {trainers} trainer ranks for {per_update} sequences per update: some idle",
        )
    if config.task == "rl" and not placement.rollout_ranks:
        _check_no_rollout(config, placement, findings)


def _check_no_rollout(config: RunConfig, placement: PlacementFacts, findings: Findings) -> None:
    """Legal where worlds may attach; evaluation beside training needs rollout ranks of the run's own."""
    if not config.rollout_array.enabled:
        findings.wrong(
            "allocation", str(placement),
            "has no rollout part; allowed: one, e.g. hf:d1+fsdp:d1, or none with rollout_array.enabled",
        )  # fmt: skip
    evaluator = config.evaluator
    if evaluator.freq_steps or evaluator.at_start or evaluator.at_end:
        findings.wrong(
            "allocation", str(placement), "has no rollout part, and the evaluator needs one; allowed: one, or "
            "evaluator.freq_steps null with evaluator.at_start and evaluator.at_end false",
        )  # fmt: skip


def _check_heartbeats(config: RunConfig, findings: Findings) -> None:
    """Rare heartbeats look like death: to the watchdog, to `pekoe status`, and to a resumption from another host."""
    cluster = config.cluster
    most = min(LONGEST_HEARTBEAT_SECONDS, cluster.silence_seconds / 3)
    if cluster.heartbeat_seconds > most:
        findings.wrong(
            "cluster.heartbeat_seconds", cluster.heartbeat_seconds,
            f"is not allowed; allowed: <= {most:g} (at most {LONGEST_HEARTBEAT_SECONDS:g}, and a third of "
            f"cluster.silence_seconds, {cluster.silence_seconds:g})",
        )  # fmt: skip


def _check_rollout_array(config: RunConfig, findings: Findings) -> None:
    """A world that is looked at, or that speaks, less often than its lease allows would always be taken for dead."""
    array = config.rollout_array
    if not array.enabled:
        return
    if array.poll_seconds > array.lease_seconds / POLLS_PER_LEASE:
        findings.wrong(
            "rollout_array.poll_seconds", array.poll_seconds,
            f"is not allowed; allowed: <= {array.lease_seconds / POLLS_PER_LEASE:g} (rollout_array.lease_seconds, "
            f"{array.lease_seconds:g}, / {POLLS_PER_LEASE})",
        )  # fmt: skip
    if array.orphan_seconds < array.lease_seconds:
        findings.wrong(
            "rollout_array.orphan_seconds", array.orphan_seconds, "would end worlds that the head still waits for; "
            f"allowed: >= rollout_array.lease_seconds ({array.lease_seconds:g})",
        )  # fmt: skip


def _check_time_limit(config: RunConfig, findings: Findings) -> None:
    limit = config.cluster.time_limit
    if limit not in (None, "auto") and duration_seconds(str(limit)) is None:
        findings.wrong("cluster.time_limit", limit, f"is no duration; allowed: auto, {FORMS}, or null")


CROSS_CHECKS: tuple[Callable[[RunConfig, Findings], None], ...] = (
    _check_names,
    _check_sampling,
    *SAMPLING_CHECKS,
    _check_objective,
    _check_rejection,
    _check_batch,
    _check_rollout,
    _check_evaluation,
    _check_heartbeats,
    _check_rollout_array,
    _check_time_limit,
    *CLUSTER_CHECKS,
)
