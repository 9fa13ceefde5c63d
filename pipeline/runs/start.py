"""Where an attempt begins: fresh, or at the newest checkpoint that every trainer rank found whole."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pekoe.pipeline import complete_folder
from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.data.dataset import Dataset, build, filter_by_length
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import LATE_SECONDS, Checkpoint, Checkpoints

logger = logging.getLogger(__name__)

HEAD = 0
HEAD_RETRY_SECONDS = 3.0
"""A handle that is stale, or one failed read, on the head's node does not make a checkpoint a damaged one."""
MAX_REASONS = 5
"""Ranks whose reasons are told of one damaged checkpoint."""


class StartWorld(Protocol):
    """The part of `launch/world.py` that the choice of a start point uses."""

    rank: int
    attempt: int

    def share(self, value: Any, root: int = 0) -> Any: ...
    def collect(self, value: Any) -> list[Any]: ...
    def set_phase(self, phase: str) -> None: ...


@dataclass(frozen=True)
class StartPoint:
    """Where this attempt begins and how long the run is; decided by the head, equal on all ranks."""

    version: int
    checkpoint: str
    """Folder of the checkpoint; empty for a fresh run."""
    num_steps: int


def choose_start(
    run: RunDirectory, config: RunConfig, world: StartWorld, trainer_ranks: Sequence[int], data: RunData
) -> StartPoint:
    """All ranks, main thread, before any role starts: one common decision, the same on every rank.

    The head proposes its checkpoints, the newest first; each trainer rank reads and compares its share of the files of
    a proposal with their hashes. One that any rank found damaged is passed over with the reason, and set aside once an
    older one is found good. Raises CheckpointError (on the head, which ends the world) when there are checkpoints but
    none is whole: a run never starts over by itself.
    """
    head = HeadChoice(Checkpoints(run, config.recover.keep, world.attempt)) if world.rank == HEAD else None
    while True:
        proposal = Proposal(**world.share(dataclasses.asdict(head.propose()) if head else None))
        if not proposal.path:
            break
        world.set_phase(f"verifying {proposal.path}")
        began = time.monotonic()
        problems: list[str] = []
        if world.rank in trainer_ranks:
            share = trainer_ranks.index(world.rank)
            problems = complete_folder.verify_share(run.path / proposal.path, share, len(trainer_ranks), LATE_SECONDS)
        found = [(rank, text) for rank, texts in enumerate(world.collect(problems)) for text in texts]
        if not found:
            logger.info("%s is whole (%.1f s)", proposal.path, time.monotonic() - began)
            break
        if head:
            head.refuse("; ".join(f"rank {rank}: {text}" for rank, text in found[:MAX_REASONS]))
    if head and proposal.path:
        head.settle()
    num_steps = world.share(number_of_steps(config, data) if head else None)
    return StartPoint(proposal.version, str(run.path / proposal.path) if proposal.path else "", num_steps)


@dataclass(frozen=True)
class Proposal:
    """A checkpoint that the head would go on from; no path: the run begins."""

    version: int
    path: str
    """Relative to the run directory."""


class HeadChoice:
    """What the head has proposed so far."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._untried = checkpoints.proposals(HEAD_RETRY_SECONDS)
        self._damaged: list[tuple[Checkpoint, str]] = []
        self._proposed: Checkpoint | None = None

    def propose(self) -> Proposal:
        """The newest one that nothing is known against. CheckpointError when all are damaged."""
        for found, problem in self._untried:
            self._proposed = found
            if not problem:
                return Proposal(found.step, f"checkpoints/{found.path.name}")
            self.refuse(problem)
        if self._damaged:
            raise self._checkpoints.none_usable([problem for _, problem in self._damaged])
        return Proposal(0, "")

    def refuse(self, reason: str) -> None:
        """The one proposed last is damaged."""
        assert self._proposed is not None
        logger.warning("checkpoint of step %d is skipped: %s", self._proposed.step, reason)
        self._damaged.append((self._proposed, reason))

    def settle(self) -> None:
        """The run goes on from the one proposed last: damaged newer ones leave the way."""
        assert self._proposed is not None
        self._checkpoints.set_aside(self._damaged)
        logger.info("going on from %s", self._proposed.path)


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
                self._built[key] = self._made(key, section)
            return self._built[key]

    def _made(self, key: str, section: DatasetConfig) -> Dataset:
        return _limited(build(section, key), self._config, section.max_length)


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
