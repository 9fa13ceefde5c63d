"""Checkpoints as the controller sees them: one in flight, written beside training, complete or given up.

    begin ─► Save to every trainer rank ─► each copies its state, goes on training, writes ─► Saved
          ─► commit, on a thread beside ─► Committed ─► tidy

A save that fails is reported and tried again at the next step boundary; so many failures in a row that
`recover.max_failures` is reached end the run. Lack of room does not count: the disk watch has its own limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pekoe.pipeline import files
from pekoe.pipeline.control.disk_watch import RETRY_SECONDS, DiskWatch
from pekoe.pipeline.messages import Message, Post, Save, Saved, WrittenFile

logger = logging.getLogger(__name__)

WHO = "a checkpoint"


class CheckpointFailure(RuntimeError):
    """Checkpoints cannot be written: what came after the last complete one is not safe."""


class Committed(Message, frozen=True):
    """Never leaves the head: the folder of a checkpoint is complete, or why not."""

    version: int
    error: str = ""
    disk_is_full: bool = False


class CheckpointFiles(Protocol):
    """Where a checkpoint becomes a folder (`runs/bookkeeping.py`); each call may raise OSError."""

    def begin(self, version: int, state: bytes) -> None:
        """An empty folder to write into; the shards that are spent now are those that it will cover, and `state` is the
        controller's snapshot that goes into it."""
        ...

    def commit(self, version: int, written: Sequence[WrittenFile]) -> None:
        """All ranks have written: begins to make it complete, durably; the inbox gets `Committed`."""
        ...

    def tidy(self) -> None:
        """It is complete: begins to remove older ones and the shards that it covers."""
        ...

    def abandon(self, version: int) -> None:
        """What was written of it is removed."""
        ...


@dataclass
class SaveInFlight:
    """One save: its version is its id."""

    version: int
    began: float
    answers: dict[int, Saved] = field(default_factory=dict)


@dataclass
class CheckpointSaves:
    """Belongs to the controller's thread."""

    post: Post
    trainer_ranks: Sequence[int]
    folder: CheckpointFiles
    disk: DiskWatch
    max_failures: int
    complete_version: int
    """Of the newest complete checkpoint; -1 when there is none."""
    seconds: float | None = None
    """How long the last complete one took from order to commit."""
    stage_seconds: float = 0.0
    """For how long of these training stood still."""
    in_flight: SaveInFlight | None = None
    failures: int = 0
    """In a row."""
    last_error: str = ""
    is_owed: bool = False
    """The last one failed: the next boundary makes one, whatever the interval says."""
    not_before: float = 0.0

    def begin(self, version: int, state: bytes) -> None:
        """Orders the save of `version`; `state` is the controller's snapshot at this boundary."""
        assert self.in_flight is None
        self.in_flight = SaveInFlight(version, time.monotonic())
        try:
            self.folder.begin(version, state)
        except OSError as error:
            self._fail(str(error), files.is_full(error))
            return
        for rank in self.trainer_ranks:
            self.post.send(rank, Save(version))

    def on_saved(self, source: int, message: Saved) -> None:
        """An answer of another save than the one in flight is of an abandoned one."""
        if self.in_flight is not None and message.version == self.in_flight.version:
            self.in_flight.answers[source] = message
            if len(self.in_flight.answers) == len(self.trainer_ranks):
                self._commit(self.in_flight)

    def on_committed(self, message: Committed) -> None:
        """The folder of the save in flight has its name, or not."""
        if self.in_flight is None or message.version != self.in_flight.version:
            return
        if message.error:
            self._fail(message.error, message.disk_is_full)
            return
        save, self.in_flight = self.in_flight, None
        self.complete_version, self.failures, self.is_owed = save.version, 0, False
        self.seconds = time.monotonic() - save.began
        self.stage_seconds = max(answer.stage_seconds for answer in save.answers.values())
        self.disk.accept(WHO)
        self.folder.tidy()
        logger.info("checkpoint of version %d is complete after %.2f s", save.version, self.seconds)

    def missing(self) -> list[int]:
        """Who has to answer yet: trainer ranks; when all have, the head itself, which seals the folder."""
        if self.in_flight is None:
            return []
        return [rank for rank in self.trainer_ranks if rank not in self.in_flight.answers] or [self.post.rank]

    def wants(self, version: int, is_due: bool) -> bool:
        """Whether to begin one now, at a boundary with nothing in flight."""
        due = is_due or (self.is_owed and time.monotonic() >= self.not_before)
        return due and self.in_flight is None and self.complete_version != version

    def _commit(self, save: SaveInFlight) -> None:
        errors = [f"rank {rank}: {m.error}" for rank, m in sorted(save.answers.items()) if m.error]
        if errors:
            self._fail("; ".join(errors), any(m.disk_is_full for m in save.answers.values()))
            return
        written = [file for message in save.answers.values() for file in message.files]
        self.folder.commit(save.version, written)

    def _fail(self, error: str, disk_is_full: bool) -> None:
        assert self.in_flight is not None
        version, self.in_flight = self.in_flight.version, None
        self.is_owed, self.last_error = True, error
        self.not_before = time.monotonic() + RETRY_SECONDS if disk_is_full else 0.0
        logger.error("checkpoint of version %d failed: %s", version, error)
        try:
            self.folder.abandon(version)
        except OSError as failure:
            logger.error("what was written of the checkpoint of version %d stays for now: %s", version, failure)
        if disk_is_full:
            self.disk.refuse(WHO, error)
            return
        self.failures += 1
        if self.failures >= self.max_failures:
            raise CheckpointFailure(
                f"{self.failures} checkpoints failed in a row (recover.max_failures), the last one of version "
                f"{version}: {error}; --resume goes on from version {max(self.complete_version, 0)}"
            )
