"""A full disk or quota pauses the run, loudly, until there is room again or a limit is over; it does not fail it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

TELL_SECONDS = 60.0
RETRY_SECONDS = 2.0
"""Between two tries of the same write."""


class DiskFull(RuntimeError):
    """There was no room for longer than `cluster.full_disk_seconds`."""


@dataclass
class Refusal:
    """One writer whose write is refused, and tried again."""

    reason: str
    since: float


@dataclass
class DiskWatch:
    """Who cannot write at the moment. Belongs to the controller: while anyone cannot, nothing is admitted."""

    limit_seconds: float
    refused: dict[str, Refusal] = field(default_factory=dict)
    count: int = 0
    """Refusals so far in this attempt."""
    told: float = 0.0

    def refuse(self, who: str, reason: str) -> None:
        """`who` could not write (it keeps what it has and tries again)."""
        now = time.monotonic()
        self.count += 1
        if who not in self.refused:
            self.refused[who] = Refusal(reason, now)
            self.told = 0.0
        self.refused[who].reason = reason

    def accept(self, who: str) -> None:
        """`who` could write."""
        if self.refused.pop(who, None) is not None and not self.refused:
            logger.warning("there is room on the disk again: admission goes on")

    @property
    def is_full(self) -> bool:
        return bool(self.refused)

    def describe(self) -> str:
        """For phases and logs; empty when all is well."""
        if not self.refused:
            return ""
        who, refusal = min(self.refused.items(), key=lambda item: item[1].since)
        more = f" (and {len(self.refused) - 1} more)" if len(self.refused) > 1 else ""
        return f"paused: disk is full: {who}{more}: {refusal.reason}"

    def forgive(self, seconds: float) -> None:
        """The run stood still for so long: that does not count."""
        for refusal in self.refused.values():
            refusal.since += seconds

    def check(self) -> None:
        """Says it again from time to time; raises DiskFull after the limit."""
        if not self.refused:
            return
        now = time.monotonic()
        age = now - min(refusal.since for refusal in self.refused.values())
        if age > self.limit_seconds:
            raise DiskFull(
                f"{self.describe()}; no room for {age:.0f} s (cluster.full_disk_seconds); what is complete stays: make "
                "room, then resume"
            )
        if now - self.told > TELL_SECONDS or not self.told:
            self.told = now
            logger.error(
                "%s; nothing new is admitted; make room within %.0f s", self.describe(), self.limit_seconds - age
            )
