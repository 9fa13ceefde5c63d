"""The head's side of attached worlds: a thread that looks at their files and speaks for them in the controller's inbox.

controller ── offer, withdraw, starve, announce (no I/O) ──► board ──► files, at each look
controller ◄── messages of "rank" BOARD ── this thread ◄── notices of the worlds
"""

from __future__ import annotations

import logging
import threading

from pekoe.pipeline.control.attached_worlds import BOARD, AttachedWorlds
from pekoe.pipeline.control.shared_weights import SharedWeights
from pekoe.pipeline.leases.config_hash import config_hash
from pekoe.pipeline.leases.lease_board import LeaseBoard
from pekoe.pipeline.leases.lease_records import SharedWeights as OfferedWeights
from pekoe.pipeline.messages import Inbox, WeightsShared
from pekoe.pipeline.runs.context import RunContext
from pekoe.pipeline.runs.transports import SHARED
from pekoe.pipeline.weights.disk import version_folder

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0


class BoardThread:
    """Owns the board's I/O. `close` says how the run ended and waits for the last look."""

    def __init__(self, context: RunContext, inbox: Inbox) -> None:
        settings = context.config.rollout_array
        self.board = LeaseBoard(
            context.run, context.world.attempt, config_hash(context.config),
            poll_seconds=settings.poll_seconds, lease_seconds=settings.lease_seconds,
        )  # fmt: skip
        self._inbox = inbox
        self._poll_seconds = settings.poll_seconds
        self._over = threading.Event()
        self._ended = threading.Event()

    def run(self) -> None:
        """Until `close`. What the disk refuses is written at a later look; OSError when it refuses for long,
        LaterAttempt when another attempt has begun."""
        self.board.open()
        while not self._over.wait(self._poll_seconds):
            self._look()
        self._look()
        self._ended.set()

    def close(self, outcome: str) -> None:
        self.board.finish(outcome)
        self._over.set()
        if not self._ended.wait(CLOSE_SECONDS):
            logger.warning("attached worlds could not be told that the run is over")

    def gauges(self) -> dict[str, float]:
        worlds = self.board.worlds()
        return {
            "worlds": float(len(worlds)),
            "ranks": float(sum(world.num_ranks for world in worlds)),
            "held": float(sum(world.num_held for world in worlds)),
            **{name: float(count) for name, count in self.board.counts.items()},
        }

    def _look(self) -> None:
        for message in self.board.poll():
            self._inbox.put((BOARD, message))


def attached_worlds(context: RunContext, thread: BoardThread) -> AttachedWorlds:
    """What the controller is given."""

    def announce(message: WeightsShared) -> None:
        folder = context.run.relative(version_folder(context.run.weights / SHARED, message.version))
        thread.board.announce(message.version, OfferedWeights(message.version, folder, message.token))

    return AttachedWorlds(
        thread.board,
        SharedWeights(context.world.post, context.ranks.trainer_ranks, announce),
        str(context.run.path),
        context.config.rollout_array.wait_seconds,
        bool(context.ranks.rollout_ranks),
    )
