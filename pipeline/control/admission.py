"""Admission: how many prompt groups may start now, so that nothing trained on is ever older than eta steps.

capacity = min(max_concurrent - running, (eta + version + 1) * batch - (accepted + running))
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Admission:
    """Counters of prompt groups. `accepted` counts every group that gave trajectories, consumed ones included."""

    max_concurrent: int
    batch: int
    eta: int | None
    """Most steps between sampling and use; None = unbounded."""
    version: int = 0
    running: int = 0
    accepted: int = 0

    def capacity(self) -> int:
        """Groups that may be admitted now; negative when limits were lowered under running work."""
        concurrency = self.max_concurrent - self.running
        if self.eta is None:
            return concurrency
        return min(concurrency, (self.eta + self.version + 1) * self.batch - (self.accepted + self.running))

    def admit(self) -> None:
        """A group starts."""
        if self.capacity() <= 0:
            raise AssertionError(f"admission without capacity: {self}")
        self.running += 1

    def accept(self) -> None:
        """A running group gave trajectories."""
        self._finish()
        self.accepted += 1

    def adopt(self) -> None:
        """A group starts that gave trajectories already, in an earlier attempt."""
        self.admit()
        self.accept()

    def reject(self) -> None:
        """A running group gave nothing: its slot is free again."""
        self._finish()

    def give_back(self) -> None:
        """An accepted group will not be consumed after all: its slot is free again."""
        self.accepted -= 1

    def consume_short(self, num_groups: int) -> None:
        """A step consumed fewer groups than a batch (end of the data): the formula goes on as if it had been full."""
        self.accepted += self.batch - num_groups

    def _finish(self) -> None:
        if self.running <= 0:
            raise AssertionError(f"a group ended that was not running: {self}")
        self.running -= 1
