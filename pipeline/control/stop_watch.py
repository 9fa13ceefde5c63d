"""When the run stops before it is done: a signal came, or the job's time is nearly over.

The time that is needed to stop is measured: the longest step so far (a committed step finishes) and the time that a
checkpoint took. What is left is counted to the end of the job, whatever has been done in it before this run began.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LEAVING_SECONDS = 15.0
"""To say goodbye, and for the processes to end."""
FIRST_GUESS_SHARE = 0.1
"""Of the time left at the start: taken for the time of a save, at most, as long as none was measured."""

GOODBYE_SHARE = 0.1
"""Of the grace: to say goodbye in, whatever else has not been done."""


@dataclass
class StopWatch:
    """Belongs to the controller."""

    is_signalled: Callable[[], bool]
    seconds_left: Callable[[], float | None]
    """Until the job ends; None when nobody knows."""
    grace_seconds: float
    """From a signal to the hard end."""
    save_seconds: float | None = None
    """Measured; None while nothing was saved."""
    step_seconds: float = 0.0
    """The longest step so far, weight update included."""
    first_left: float | None = None
    time_is_up: bool = False
    signalled_at: float | None = None
    """When the signal was first seen here (monotonic seconds)."""

    def begin(self) -> None:
        """The run's loop starts: what is left now bounds the guesses."""
        self.first_left = self.seconds_left()
        if self.first_left is not None:
            logger.info("the job ends in %.0f s (cluster.time_limit)", self.first_left)

    def listen(self) -> None:
        """Called often, also between boundaries: the grace counts from the signal, not from when it is obeyed."""
        if self.signalled_at is None and self.is_signalled():
            self.signalled_at = time.monotonic()

    def requested(self) -> bool:
        """Whether to stop at the next boundary; stays true."""
        self.listen()
        if self.signalled_at is not None:
            return True
        if self.time_is_up:
            return True
        left = self.seconds_left()
        if left is not None and left < self.needed():
            self.time_is_up = True
            logger.warning(
                "the job ends in %.0f s, and %.0f s are needed to save and leave: stopping", left, self.needed()
            )
        return self.time_is_up

    def needed(self) -> float:
        """Seconds from now to the end of the processes, if the run were stopped."""
        save = self.save_seconds
        if save is None:
            save = min(self.grace_seconds, FIRST_GUESS_SHARE * (self.first_left or 0.0))
        leaving = min(LEAVING_SECONDS, FIRST_GUESS_SHARE * self.first_left) if self.first_left else LEAVING_SECONDS
        return save + self.step_seconds + leaving

    def left(self) -> float | None:
        """Seconds to the hard end: of the grace after a signal, of the job; None while there is none."""
        grace = None if self.signalled_at is None else self.signalled_at + self.grace_seconds - time.monotonic()
        return min((left for left in (grace, self.seconds_left()) if left is not None), default=None)

    def fits(self) -> bool:
        """Whether a save would be over before the hard end; unmeasured ones are taken to fit."""
        left = self.left()
        return left is None or (self.save_seconds or 0.0) <= left

    def spare(self, seconds: float) -> float:
        """So many of these seconds as may go into what can be left undone: after a stop at most half of what is
        left."""
        left = self.left() if self.requested() else None
        return seconds if left is None else min(seconds, max(0.0, left / 2))

    def is_over(self) -> bool:
        """Whether a stop was asked for, and what is left is needed to say goodbye; stays true."""
        if not self.requested():
            return False
        left = self.left()
        return left is not None and left < GOODBYE_SHARE * self.grace_seconds
