"""What the tasks of a run have in common: which of them sample, and how many sequences a step has."""

from __future__ import annotations

from pekoe.pipeline.config.run import RunConfig

SUPERVISED = ("sft", "dpo", "rw")
"""Tasks that learn from a data set alone: no rollout ranks, no rewards."""
PAIR_TASKS = ("dpo", "rw")
"""Tasks whose examples are two sequences, which stay together."""


def is_supervised(config: RunConfig) -> bool:
    """Whether the run samples nothing."""
    return config.task in SUPERVISED


def sides(config: RunConfig) -> int:
    """Sequences of an example of a supervised task."""
    return 2 if config.task in PAIR_TASKS else 1


def sequences_per_step(config: RunConfig) -> int:
    """Sequences of a full batch."""
    return config.train_dataset.batch_size * (sides(config) if is_supervised(config) else config.gconfig.n_samples)


def has_policy_loss(config: RunConfig) -> bool:
    """Whether rewards move the policy: distillation alone has none of that."""
    return not is_supervised(config) and (config.teacher is None or config.teacher.rl_loss_weight > 0)
