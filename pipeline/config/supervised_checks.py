"""What supervised tasks ask of data and lengths."""

from __future__ import annotations

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.config.findings import Findings
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.tasks import is_supervised, sides

DATASET_OF_TASK = {"sft": "demonstrations", "dpo": "preferences", "rw": "preferences"}


def labelled_limit(section: DatasetConfig, model_limit: int | None) -> int | None:
    """Most tokens of a sequence of a supervised task: longer ones are cut. None: nothing limits it."""
    known = [number for number in (section.max_length, model_limit) if number is not None]
    return min(known) if known else None


def longest_labelled(config: RunConfig, model_limit: int | None) -> int | None:
    """Most tokens of a sequence of any data set of a supervised run. None: nothing limits it."""
    limits = [labelled_limit(section, model_limit) for _, section in _sections(config)]
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def check_supervised_length(config: RunConfig, model_limit: int | None, findings: Findings) -> None:
    """A demonstration, or both sides of a pair, fit into a micro-batch."""
    room = config.actor.mb_spec.max_tokens_per_mb // sides(config)
    for key, section in _sections(config):
        if section.max_length is not None and model_limit is not None and section.max_length > model_limit:
            allowed = f"is above the model's context; allowed: <= {model_limit}, or null"
            findings.wrong(f"{key}.max_length", section.max_length, allowed)
        limit = labelled_limit(section, model_limit)
        if limit is None or limit > room:
            of = "unlimited" if limit is None else f"{limit} tokens"
            each = " / 2: pairs stay together" if sides(config) == 2 else ""
            findings.wrong(
                f"{key}.max_length", section.max_length, f"leaves sequences that no micro-batch can hold ({of}); "
                f"allowed: <= {room} (actor.mb_spec.max_tokens_per_mb{each})",
            )  # fmt: skip


def check_supervised_data(config: RunConfig, findings: Findings) -> None:
    """Data of the task's kind."""
    wanted = DATASET_OF_TASK.get(config.task)
    for key, section in _sections(config):
        if wanted is None and section.type in DATASET_OF_TASK.values():
            findings.wrong(
                f"{key}.type", section.type, f"is not allowed in task {config.task}; allowed: prompts, e.g. jsonl"
            )
        if wanted is not None and ":" not in section.type and section.type != wanted:
            findings.wrong(
                f"{key}.type", section.type, f"is not allowed in task {config.task}; allowed: {wanted}, or "
                "module:attribute",
            )  # fmt: skip
    if config.rollout_array.enabled and is_supervised(config):
        findings.wrong("rollout_array.enabled", True, f"has no use in task {config.task}; allowed: false")


def _sections(config: RunConfig) -> list[tuple[str, DatasetConfig]]:
    found = [("train_dataset", config.train_dataset)]
    return found if config.valid_dataset is None else [*found, ("valid_dataset", config.valid_dataset)]
