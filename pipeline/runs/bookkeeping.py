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
from collections.abc import Callable, Iterable, Sequence

from pekoe.pipeline import files
from pekoe.pipeline.control.checkpoint_saves import Committed
from pekoe.pipeline.control.dispatcher import Loss, Losses
from pekoe.pipeline.control.step import StepRows
from pekoe.pipeline.messages import WrittenFile
from pekoe.pipeline.runs.spent_shards import SpentShards
from pekoe.pipeline.train.checkpoint import CONTROLLER_STATE, Checkpoints
from pekoe.pipeline.trajectory.ledger import Entry, Ledger

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Bookkeeping:
    """Owned by the controller's thread; `run` is the body of the thread beside it."""

    def __init__(
        self,
        ledger: Ledger,
        checkpoints: Checkpoints,
        spent: SpentShards,
        take_idle_shards: Callable[[], set[str]],
        tell: Callable[[Committed], None],
        world_size: int,
        consumed_before: Iterable[str] = (),
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        """`consumed_before`: shards on disk that earlier attempts have trained on. `may_write` raises once a newer
        attempt has the run: nothing is recorded, committed or removed then."""
        self._may_write = may_write
        self._ledger, self._checkpoints, self._spent = ledger, checkpoints, spent
        self._take_idle_shards, self._tell, self._world_size = take_idle_shards, tell, world_size
        self._consumed = set(consumed_before)
        self._covered: set[str] = set()
        self._to_spend: tuple[set[str], set[str]] = set(), set()
        """(consumed, unused), of the thread beside: what the disk would not let go stays here until the next try."""
        self._state = b""
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def run(self) -> None:
        """Until `close`. A full disk leaves things to the next checkpoint; any other error ends the run."""
        while (work := self._work.get()) is not None:
            work()
        self._ended.set()

    def close(self, seconds: float) -> None:
        """Finishes what is under way, for at most so long."""
        self._work.put(lambda: self._with_room(self._spent.close))
        self._work.put(None)
        if not self._ended.wait(seconds):
            logger.warning("old checkpoints and spent shards are still being removed; the next attempt goes on with it")

    def spend(self, shards: Sequence[str]) -> None:
        """Shards of earlier attempts in which nothing is open: a checkpoint covers them already."""
        self._work.put(lambda: self._spend(shards, ()))

    def record_step(self, version: int, rows: StepRows, losses: Losses) -> None:
        """Durable before anything relies on it; the same again is accepted."""
        consumed = [
            Entry(group.number, group.try_number, group.shard, tuple(row.row for row in group.rows))
            for group in rows.groups
        ]
        self._may_write()
        self._ledger.record(
            version, consumed=consumed, filtered=_entries(losses.filtered), skipped=_entries(losses.skipped)
        )
        self._consumed.update(entry.shard for entry in consumed)

    def record_end(self, version: int, losses: Losses) -> None:
        self._may_write()
        self._ledger.record_end(version, _entries(losses.filtered), _entries(losses.skipped))

    def begin(self, version: int, state: bytes) -> None:
        """See `CheckpointFiles`."""
        self._checkpoints.begin(version)
        self._state = state
        self._covered |= self._take_idle_shards()

    def commit(self, version: int, written: Sequence[WrittenFile]) -> None:
        """See `CheckpointFiles`."""
        state, self._state = self._state, b""
        self._work.put(lambda: self._commit(version, state, tuple(written)))

    def tidy(self) -> None:
        """See `CheckpointFiles`."""
        consumed, unused = sorted(self._covered & self._consumed), sorted(self._covered - self._consumed)
        self._consumed -= self._covered
        self._covered = set()
        self._work.put(lambda: self._with_room(self._checkpoints.prune))
        self._work.put(lambda: self._spend(consumed, unused))

    def abandon(self, version: int) -> None:
        """See `CheckpointFiles`."""
        self._checkpoints.abandon(version)

    def _commit(self, version: int, state: bytes, written: Sequence[WrittenFile]) -> None:
        self._may_write()
        try:
            with files.create(self._checkpoints.part(version) / CONTROLLER_STATE) as file:
                file.write(state)
            own = WrittenFile(CONTROLLER_STATE, file.num_bytes, file.digest)
            self._checkpoints.commit(version, {"world_size": self._world_size}, [*written, own])
        except OSError as error:
            self._tell(Committed(version, str(error), files.is_full(error)))
        else:
            self._tell(Committed(version))

    def _spend(self, consumed: Iterable[str], unused: Iterable[str]) -> None:
        all_consumed, all_unused = self._to_spend
        all_consumed.update(consumed)
        all_unused.update(unused)

        def take() -> None:
            self._spent.take(sorted(all_consumed), sorted(all_unused))
            all_consumed.clear()
            all_unused.clear()

        self._with_room(take)

    def _with_room(self, work: Callable[[], object]) -> None:
        self._may_write()
        try:
            work()
        except OSError as error:
            logger.error("tidying up failed, and is tried again after the next checkpoint: %s", error)


def _entries(losses: list[Loss]) -> list[Entry]:
    return [Entry(loss.group, loss.try_number, reason=loss.reason) for loss in losses]
