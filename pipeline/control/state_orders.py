"""What the head has trainer ranks do with their state at step boundaries: checkpoints, exports, a last save in time.

One save is in flight at most, and it is written beside training. A full disk is waited for; after a stop only what
still fits before the hard end is begun.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import msgspec

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.checkpoint_saves import CheckpointSaves, Committed
from pekoe.pipeline.control.pump import Pump
from pekoe.pipeline.control.stop_watch import StopWatch
from pekoe.pipeline.messages import Export, Exported, Message, Post, Present, RollCall, Saved

logger = logging.getLogger(__name__)

EXPORTS = PurePosixPath("exports")


@dataclass
class StateOrders:
    """Belongs to the thread of the head that decides; its handlers hang in the pump."""

    config: RunConfig
    post: Post
    trainer_ranks: Sequence[int]
    pump: Pump
    saves: CheckpointSaves
    stop: StopWatch
    snapshot: Callable[[], dict[str, object]]
    """What of the head's state goes into a checkpoint: plain values."""
    peer_failed: Callable[[], bool]
    saved: Callable[[float, float], None]
    """Told of each complete checkpoint: its seconds, and for how long of these training stood still."""
    exported_version: int = -1
    exported: dict[str, Exported] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)
    roll_calls: int = 0

    def listen(self) -> None:
        """Hears what trainer ranks answer."""
        self.pump.handlers.update(
            {
                Saved: self.saves.on_saved,
                Committed: self._on_committed,
                Exported: lambda source, message: self.exported.__setitem__(message.path, message),
                Present: self._on_present,
            }
        )

    def save_if_wanted(self, version: int, is_due: bool) -> None:
        """At a step boundary: a due save waits for the one before."""
        if is_due:
            self.await_save()
        if self.saves.wants(version, is_due):
            self._begin_save(version)
            if not self.config.recover.asynchronous:
                self.await_save()

    def await_save(self) -> None:
        """Until no save is in flight; after a stop for as long as there is time."""
        save = self.saves.in_flight
        if save is not None:
            self.pump.wait(
                lambda: (self.saves.in_flight is None or self.stop.is_over()) or None,
                f"the checkpoint of version {save.version}",
                on=self.saves.missing,
            )

    def save_at_last(self, version: int) -> None:
        """The last checkpoint of the attempt: tried until it is complete or a limit is reached, after a stop only if it
        can be."""
        if self.stop.requested() and not self._can_save(version):
            self.await_save()
        else:
            self._insist(version)
        if self.saves.complete_version != version:
            safe = max(self.saves.complete_version, 0)
            logger.error("stopping without a checkpoint of version %d: --resume goes on from %d", version, safe)

    def export(self, version: int) -> None:
        """A Hugging Face folder of this version; left to the resumed run when a stop comes before it is begun, or while
        there is no room for it."""
        path = str(EXPORTS / f"step-{version}")
        while self.exported_version != version and not self.stop.requested():
            began = time.monotonic()
            self.exported.pop(path, None)
            self.tell(Export(version, path))
            done = self.pump.wait(lambda: self.exported.get(path), "the export", on=lambda: self.trainer_ranks[:1])
            if done.disk_is_full:
                self.pump.wait_for_room("an export", done.error)
                continue
            self.pump.disk.accept("an export")
            self.exported_version = version
            self.stop.step_seconds = max(self.stop.step_seconds, time.monotonic() - began)

    def tell(self, message: Message) -> None:
        """To all trainer ranks, in one order."""
        for rank in self.trainer_ranks:
            self.post.send(rank, message)

    def without(self, answered: Container[int]) -> list[int]:
        """Trainer ranks that are not among those."""
        return [rank for rank in self.trainer_ranks if rank not in answered]

    def _begin_save(self, version: int) -> None:
        measured = {"version": version, "save_seconds": self.stop.save_seconds}
        self.saves.begin(version, msgspec.msgpack.encode({**measured, **self.snapshot()}))

    def _insist(self, version: int) -> None:
        self.await_save()
        while self.saves.complete_version != version and not self.stop.is_over():
            self._begin_save(version)
            self.await_save()
            self.pump.wait(
                lambda: (time.monotonic() >= self.saves.not_before or self.stop.is_over()) or None,
                "room for the checkpoint",
            )

    def _can_save(self, version: int) -> bool:
        """After a stop: nothing collective begins unless every trainer rank answers in time and the save would be over
        before the hard end."""
        if self.saves.complete_version == version:
            return True
        if self.peer_failed():
            logger.error("another rank has failed: no checkpoint is begun")
            return False
        if not self.stop.fits():
            logger.error("a checkpoint takes %.0f s, which is more than is left", self.stop.save_seconds)
            return False
        self.roll_calls += 1
        self.present.clear()
        self.tell(RollCall(self.roll_calls))
        deadline = time.monotonic() + self.config.cluster.acknowledge_seconds

        def answered() -> bool | None:
            if len(self.present) == len(self.trainer_ranks):
                return True
            return False if time.monotonic() > deadline else None

        if not self.pump.wait(answered, "trainer ranks to answer", on=lambda: self.without(self.present)):
            logger.error(
                "ranks %s did not answer within %.0f s (cluster.acknowledge_seconds): no checkpoint is begun",
                self.without(self.present),
                self.config.cluster.acknowledge_seconds,
            )
            return False
        return True

    def _on_committed(self, source: int, message: Committed) -> None:
        self.saves.on_committed(message)
        if self.saves.complete_version == message.version and self.saves.seconds is not None:
            self.stop.save_seconds = self.saves.seconds
            self.saved(self.saves.seconds, self.saves.stage_seconds)

    def _on_present(self, source: int, message: Present) -> None:
        if message.number == self.roll_calls:
            self.present.add(source)


def is_due(interval: int | None, version: int) -> bool:
    """Whether what is done every `interval` steps (None: never) is done at this version."""
    return interval is not None and version % interval == 0
