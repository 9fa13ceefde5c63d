"""Attached worlds as the controller sees them: one more place for groups, and somebody else who needs new weights.

    admit_all ─► offer ─► board (files, a thread of its own) ─► worlds ─► notices, as messages of "rank" BOARD
    step boundary ─► weights on disk ─► board tells the worlds of the version

They never hold up the run: nothing waits for one of them, and a group that one leaves is offered again by the board.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

from pekoe.pipeline.control.shared_weights import SharedWeights
from pekoe.pipeline.messages import Assign

logger = logging.getLogger(__name__)

BOARD = -2
"""Stands for all attached worlds where a rank is named."""


class GroupBoard(Protocol):
    """Where groups are offered (`leases/lease_board.py`); these calls do no I/O."""

    def offer(self, assign: Assign) -> None: ...
    def withdraw(self, group: int, try_number: int) -> None: ...
    def capacity(self) -> int: ...
    def num_ranks(self) -> int: ...
    def stranded(self) -> list[tuple[int, int]]: ...
    def starve(self, is_starving: bool) -> None: ...


class NoRolloutWorld(RuntimeError):
    """A run without rollout ranks of its own waited in vain for a world to attach."""


@dataclass
class AttachedWorlds:
    """Belongs to the controller's thread."""

    board: GroupBoard
    weights: SharedWeights
    run: str
    """The run directory, for people."""
    wait_seconds: float
    has_others: bool
    """Whether the run has rollout ranks of its own."""
    alone_since: float | None = None

    def is_alone(self) -> bool:
        """Whether nobody can sample now: that does not count as lack of progress. NoRolloutWorld after the limit."""
        now = time.monotonic()
        if self.has_others or self.board.num_ranks():
            if self.alone_since is not None and not self.has_others:
                logger.info("a world has attached after %.0f s", now - self.alone_since)
            self.alone_since = None
            return False
        if self.alone_since is None:
            self.alone_since = now
            logger.warning(
                "no rollout rank here, no attached world: start some, e.g. pekoe submit --rollout-array %s --array 0-3",
                self.run,
            )
        if now - self.alone_since > self.wait_seconds:
            raise NoRolloutWorld(
                f"no world has attached for {now - self.alone_since:.0f} s (rollout_array.wait_seconds is "
                f"{self.wait_seconds:g}); start a rollout array, then resume"
            )
        return True
