"""Where an attempt begins: fresh, or at the newest complete checkpoint."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.data.dataset import Dataset, build, filter_by_length
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import Checkpoints

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartPoint:
    """Where this attempt begins and how long the run is; decided by the head, equal on all ranks."""

    version: int
    checkpoint: str
    """Folder of the checkpoint; empty for a fresh run."""
    num_steps: int


def find_start(run: RunDirectory, config: RunConfig, attempt: int, data: RunData) -> StartPoint:
    """Head only. Raises when there are checkpoints but none is whole: a run never starts over by itself."""
    num_steps = number_of_steps(config, data)
    latest = Checkpoints(run, config.recover.keep, attempt).latest()
    if latest is None:
        return StartPoint(0, "", num_steps)
    version, folder = latest
    logger.info("going on from %s", folder)
    return StartPoint(version, str(folder), num_steps)


class RunData:
    """The examples of a run: the same rows on every rank, built once in a process, by whoever needs them first."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._built: dict[str, Dataset] = {}

    @property
    def training(self) -> Dataset:
        return self._get("train_dataset", self._config.train_dataset)

    @property
    def validation(self) -> Dataset | None:
        section = self._config.valid_dataset
        return None if section is None else self._get("valid_dataset", section)

    def _get(self, key: str, section: DatasetConfig) -> Dataset:
        with self._lock:
            if key not in self._built:
                self._built[key] = _limited(build(section, key), self._config, section.max_length)
            return self._built[key]


def number_of_steps(config: RunConfig, data: RunData) -> int:
    """Training steps of the whole run."""
    steps = math.ceil(len(data.training) * config.total_train_epochs / config.train_dataset.batch_size)
    return steps if config.total_train_steps is None else min(steps, config.total_train_steps)


def _limited(dataset: Dataset, config: RunConfig, limit: int | None) -> Dataset:
    if limit is None:
        return dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path or config.actor.path)
    kept, num_left_out = filter_by_length(dataset, tokenizer, limit, config.workflow.args.get("template_args"))
    if num_left_out:
        logger.warning("%d of %d prompts have more than %d tokens and are left out", num_left_out, len(dataset), limit)
    return kept
