"""What keys ask of each other; `check.py` runs these when every single value is legal."""

from __future__ import annotations

import re
from collections.abc import Callable

from pekoe.pipeline import registry
from pekoe.pipeline.config.cluster_checks import CLUSTER_CHECKS, check_nodes
from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.config.durations import FORMS, duration_seconds
from pekoe.pipeline.config.engine_checks import SAMPLING_CHECKS, check_engine
from pekoe.pipeline.config.findings import Findings, PlacementFacts
from pekoe.pipeline.config.generation import GenerationConfig
from pekoe.pipeline.config.objective_checks import OBJECTIVE_CHECKS, check_registered
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.supervised_checks import check_supervised_data
from pekoe.pipeline.config.task_checks import TASK_CHECKS, check_task_placement
from pekoe.pipeline.config.tasks import is_supervised, sequences_per_step

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
        check_registered(key, name, table, findings)


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
    if spec.max_sequences_per_mb is not None and spec.max_sequences_per_mb < spec.granularity:
        findings.wrong(
            "actor.mb_spec.max_sequences_per_mb",
            spec.max_sequences_per_mb,
            f"is not allowed; allowed: >= granularity ({spec.granularity}), or null",
        )


def _check_sharing(config: RunConfig, findings: Findings) -> None:
    """Prefix sharing needs rows that begin alike in one micro-batch."""
    key, actor = "actor.enable_tree_training", config.actor
    if not actor.enable_tree_training:
        return
    if config.task == "sft" or (not is_supervised(config) and config.gconfig.n_samples == 1):
        why = "task sft" if is_supervised(config) else "gconfig.n_samples 1"
        findings.warn(key, True, f"has no effect with {why}: no two sequences have a prompt in common")
    elif actor.mb_spec.max_sequences_per_mb == 1:
        findings.wrong(key, True, "is not allowed with actor.mb_spec.max_sequences_per_mb 1; allowed: >= 2, or null")
    for section, model in (("actor", actor), ("critic", config.critic)):
        if model is not None and not model.disable_dropout:
            findings.wrong(
                f"{section}.disable_dropout", False, f"is not allowed with {key}: samples of a prompt would have its "
                "dropout in common; allowed: true",
            )  # fmt: skip


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
    if config.valid_dataset is not None:
        for name in ("batch_size", "shuffle"):
            value = getattr(config.valid_dataset, name)
            if value != getattr(DatasetConfig(), name):
                findings.warn(f"valid_dataset.{name}", value, "has no effect: every example is taken once")
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
    check_task_placement(config, placement, findings)
    per_update = sequences_per_step(config)
    if not is_supervised(config):
        per_update //= config.actor.ppo_n_minibatches
    trainers = len(placement.trainer_ranks)
    if trainers > per_update:
        findings.warn(
            "allocation",
            str(placement),
            f"has {trainers} trainer ranks for {per_update} sequences per update: some idle",
        )
    if not is_supervised(config) and not placement.rollout_ranks:
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


_CHECKS: tuple[Callable[[RunConfig, Findings], None], ...] = (
    _check_names,
    *TASK_CHECKS,
    check_supervised_data,
    _check_sharing,
    _check_evaluation,
    _check_heartbeats,
    _check_time_limit,
    *CLUSTER_CHECKS,
)
_SAMPLING_RUN_CHECKS: tuple[Callable[[RunConfig, Findings], None], ...] = (
    _check_sampling,
    *SAMPLING_CHECKS,
    *OBJECTIVE_CHECKS,
    _check_batch,
    _check_rollout,
    _check_rollout_array,
)


def check_keys(config: RunConfig, findings: Findings) -> None:
    """What keys ask of each other in the run's task."""
    for look in (*_CHECKS, *(() if is_supervised(config) else _SAMPLING_RUN_CHECKS)):
        look(config, findings)
