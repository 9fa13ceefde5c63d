"""What the head keeps of a run on disk: ledger, checkpoints, and the shards that a checkpoint makes superfluous.

    controller ─► record_step: durable before anything relies on it
               ─► begin: which shards are spent now ─► … ─► commit ─► Committed in the inbox
               ─► tidy: old checkpoints are pruned, those shards deleted or archived

Sealing and tidying may take long on a big run: a thread beside the controller does them, and it waits for neither.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from pekoe.pipeline import files
from pekoe.pipeline.control.checkpoint_saves import Committed
from pekoe.pipeline.control.dispatcher import Loss, Losses
from pekoe.pipeline.control.step import StepRows
from pekoe.pipeline.messages import WrittenFile
from pekoe.pipeline.train.checkpoint import Checkpoints
from pekoe.pipeline.trajectory.ledger import Entry, Ledger
from pekoe.pipeline.trajectory.store import Store

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Trash(Protocol):
    """What is done with spent shards: deleted, archived, or nothing."""

    def take(self, names: Sequence[str]) -> None: ...
    def close(self) -> None: ...


class Deleted:
    """Spent shards are deleted."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def take(self, names: Sequence[str]) -> None:
        self._store.collect(names)

    def close(self) -> None:
        """Nothing waits."""


class Kept:
    """Spent shards stay where they are."""

    def take(self, names: Sequence[str]) -> None:
        """Nothing is done."""

    def close(self) -> None:
        """Nothing waits."""


class Bookkeeping:
    """Owned by the controller's thread; `run` is the body of the thread beside it."""

    def __init__(
        self,
        ledger: Ledger,
        checkpoints: Checkpoints,
        trash: Trash,
        take_idle_shards: Callable[[], set[str]],
        tell: Callable[[Committed], None],
        world_size: int,
    ) -> None:
        self._ledger, self._checkpoints, self._trash = ledger, checkpoints, trash
        self._take_idle_shards, self._tell, self._world_size = take_idle_shards, tell, world_size
        self._covered: set[str] = set()
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def run(self) -> None:
        """Until `close`. A full disk leaves things to the next checkpoint; any other error ends the run."""
        while (work := self._work.get()) is not None:
            work()
        self._ended.set()

    def close(self, seconds: float) -> None:
        """Finishes what is under way, for at most so long."""
        self._work.put(self._close_trash)
        self._work.put(None)
        if not self._ended.wait(seconds):
            logger.warning("old checkpoints and spent shards are still being removed; the next attempt goes on with it")

    def record_step(self, version: int, rows: StepRows, losses: Losses) -> None:
        """Durable before anything relies on it; the same again is accepted."""
        consumed = [
            Entry(group.number, group.try_number, group.shard, tuple(row.row for row in group.rows))
            for group in rows.groups
        ]
        self._ledger.record(
            version, consumed=consumed, filtered=_entries(losses.filtered), skipped=_entries(losses.skipped)
        )

    def record_end(self, version: int, losses: Losses) -> None:
        self._ledger.record_end(version, _entries(losses.filtered), _entries(losses.skipped))

    def begin(self, version: int) -> None:
        """See `CheckpointFiles`."""
        self._checkpoints.begin(version)
        self._covered |= self._take_idle_shards()

    def commit(self, version: int, written: Sequence[WrittenFile]) -> None:
        """See `CheckpointFiles`."""
        self._work.put(lambda: self._commit(version, tuple(written)))

    def tidy(self) -> None:
        """See `CheckpointFiles`."""
        covered, self._covered = sorted(self._covered), set()
        self._work.put(lambda: self._with_room(self._checkpoints.prune))
        self._work.put(lambda: self._with_room(lambda: self._trash.take(covered)))

    def abandon(self, version: int) -> None:
        """See `CheckpointFiles`."""
        self._checkpoints.abandon(version)

    def _commit(self, version: int, written: Sequence[WrittenFile]) -> None:
        try:
            self._checkpoints.commit(version, {"world_size": self._world_size}, written)
        except OSError as error:
            self._tell(Committed(version, str(error), files.is_full(error)))
        else:
            self._tell(Committed(version))

    def _close_trash(self) -> None:
        self._with_room(self._trash.close)

    def _with_room(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            logger.error("tidying up failed, and is tried again after the next checkpoint: %s", error)


def _entries(losses: list[Loss]) -> list[Entry]:
    return [Entry(loss.group, loss.try_number, reason=loss.reason) for loss in losses]
