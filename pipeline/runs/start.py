"""Where an attempt begins: fresh, or at the newest complete checkpoint."""

from __future__ import annotations

import logging
import math

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.data.dataset import Dataset, build, filter_by_length
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.context import StartPoint
from pekoe.pipeline.train.checkpoint import Checkpoints

logger = logging.getLogger(__name__)


def find_start(run: RunDirectory, config: RunConfig, attempt: int) -> StartPoint:
    """Head only. Raises when there are checkpoints but none is whole: a run never starts over by itself."""
    latest = Checkpoints(run, config.recover.keep, attempt).latest()
    if latest is None:
        return StartPoint(0, "")
    version, folder = latest
    logger.info("going on from %s", folder)
    return StartPoint(version, str(folder))


def training_data(config: RunConfig) -> Dataset:
    """The prompts to train on: the same rows on every rank."""
    return _limited(build(config.train_dataset, "train_dataset"), config, config.train_dataset.max_length)


def validation_data(config: RunConfig) -> Dataset | None:
    if config.valid_dataset is None:
        return None
    return _limited(build(config.valid_dataset, "valid_dataset"), config, config.valid_dataset.max_length)


def number_of_steps(config: RunConfig) -> int:
    """Training steps of the whole run."""
    steps = math.ceil(len(training_data(config)) * config.total_train_epochs / config.train_dataset.batch_size)
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
