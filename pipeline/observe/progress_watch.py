"""Watches that a thread gets on with its work: being alive is not enough.

A thread offers a counter that grows with its work (tokens, groups, optimiser updates) and says whether it has any to
do. Busy with an unchanged counter for longer than the limit means stalled. Time is counted between looks, and a long
gap between two looks (the whole process was stopped) counts as little.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from pekoe.pipeline.messages import ThreadPhase

logger = logging.getLogger(__name__)

LONGEST_GAP = 5.0
"""Seconds between two looks that count at most."""

ReadProgress = Callable[[], tuple[float, bool]]
"""(counter, has work to do); called on the main thread: cheap, no I/O, no lock that is held for long."""


class StalledRoleError(RuntimeError):
    """A thread has work and does not get on with it."""

    def __init__(self, text: str, stacks: Mapping[int, str]) -> None:
        super().__init__(text)
        self.stacks = dict(stacks)
        """Rank -> the Python stacks of its threads."""
        self.ranks = tuple(stacks)


class ProgressWatch:
    """Of one thread. `look` is called about every second, from one thread."""

    def __init__(self, who: str, read: ReadProgress, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.who = who
        self.limit = limit
        self.stalled_seconds = 0.0
        """How long it has been busy without progress."""
        self.is_busy = False
        self._read = read
        self._clock = clock
        self._counter: float | None = None
        self._looked = clock()

    @property
    def is_stalled(self) -> bool:
        return self.stalled_seconds > self.limit

    def look(self) -> None:
        now = self._clock()
        gap, self._looked = min(now - self._looked, LONGEST_GAP), now
        was_busy = self.is_busy
        try:
            counter, self.is_busy = self._read()
        except RuntimeError:
            logger.debug("the progress of %s cannot be read", self.who, exc_info=True)
            return
        if not (was_busy and self.is_busy) or counter != self._counter:
            self.stalled_seconds = 0.0
        else:
            self.stalled_seconds += gap
        self._counter = counter

    def phase(self) -> ThreadPhase:
        """For heartbeats: how long without progress, of how long at most."""
        words = "working, last progress" if self.is_busy else "idle"
        return ThreadPhase(self.who, words, round(self.stalled_seconds, 3), self.limit)
