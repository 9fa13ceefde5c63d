"""The controller's ears: messages go to their handlers while straight-line code waits for what it needs.

Each wait has a reason, an age, a limit, and names the ranks that it waits for. Progress is what arrives: a wait during
which nothing arrived for the limit ends the run, with the stacks of those ranks.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pekoe.pipeline import files
from pekoe.pipeline.control.disk_watch import RETRY_SECONDS, DiskWatch
from pekoe.pipeline.messages import Inbox, Message
from pekoe.pipeline.observe.phases import SetPhase

logger = logging.getLogger(__name__)
T = TypeVar("T")

DRAIN = 2000
"""Messages handled before the loop looks at its conditions again."""
TELL_SECONDS = 60.0
LONGEST_TURN = 5.0
"""Seconds between two looks; more means that the process stood still."""
SHOWN_RANKS = 8
"""Ranks that heartbeats and texts name of those that are waited for, and whose stacks an error record shows."""


class NoProgress(RuntimeError):
    """A wait outlived its limit. Carries what the ranks that did not answer are doing."""

    def __init__(self, text: str, ranks: Sequence[int], stacks: dict[int, str]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        self.stacks = stacks


def nobody() -> Sequence[int]:
    return ()


@dataclass
class Pump:
    """Owns the inbox. `while_waiting` runs at each turn of a wait (admission, display)."""

    inbox: Inbox
    set_phase: SetPhase
    describe: Callable[[], str]
    stacks_of: Callable[[Sequence[int]], dict[int, str]]
    while_waiting: Callable[[], None]
    disk: DiskWatch
    limit: float
    """Seconds without progress after which a wait ends the run (`cluster.progress_seconds`)."""
    is_over: Callable[[], bool]
    """Whether a stop was asked for and no time is left to wait for anything."""
    handlers: dict[type[Message], Callable[[int, Any], None]] = field(default_factory=dict)
    last_progress: float = 0.0
    reason: str = "start"

    def wait(
        self,
        until: Callable[[], T | None],
        reason: str,
        limit: float | None = None,
        on: Callable[[], Sequence[int]] = nobody,
        key: str = "cluster.progress_seconds",
    ) -> T:
        """Handles messages until `until` gives something other than None. `on` names the ranks that are waited for,
        `key` the configuration key that the limit comes from."""
        limit = limit or self.limit
        self.reason = reason
        began = self.last_progress = looked = time.monotonic()
        told = began + TELL_SECONDS
        while True:
            looked = self._leave_out_suspension(looked)
            self.disk.check()
            self.while_waiting()
            found = until()
            if found is not None:
                self.set_phase("control")
                return found
            before = self.disk.describe()
            phase = f"{before}; waiting for {reason}" if before else f"waiting for {reason}"
            self.set_phase(phase, limit=limit, on=on()[:SHOWN_RANKS], moved=self.last_progress)
            self.turn(0.1)
            now = time.monotonic()
            if before:
                self.last_progress = now
            if now - self.last_progress > limit:
                what = f"waited {now - began:.0f} s for {reason}{named(on())} ({key} is {limit:g})"
                raise NoProgress(f"{what}: {self.describe()}", on(), self.stacks_of(on()[:SHOWN_RANKS]))
            if now > told:
                logger.warning("waiting for %s since %.0f s%s: %s", reason, now - began, named(on()), self.describe())
                told = now + TELL_SECONDS

    def durably(self, who: str, write: Callable[[], None]) -> bool:
        """A small write that the run cannot go on without: a full disk is waited for, after a stop only while there is
        time for it. False: it was not written."""
        while True:
            try:
                write()
            except OSError as error:
                if not files.is_full(error):
                    raise
                if self.is_over():
                    return False
                self.wait_for_room(who, str(error))
                continue
            self.disk.accept(who)
            return True

    def wait_for_room(self, who: str, reason: str) -> None:
        """A pause before the next try; nothing is admitted meanwhile."""
        self.disk.refuse(who, reason)
        end = time.monotonic() + RETRY_SECONDS
        self.wait(lambda: time.monotonic() >= end or None, f"room for {who}")

    def _leave_out_suspension(self, looked: float) -> float:
        """A job that was suspended as a whole (`scontrol suspend`, SIGSTOP) has not waited meanwhile."""
        now = time.monotonic()
        gap = now - looked - LONGEST_TURN
        if gap > 0:
            self.last_progress += gap
            self.disk.forgive(gap)
        return now

    def turn(self, timeout: float) -> None:
        """Handles what has arrived; waits up to `timeout` for the first message."""
        try:
            source, message = self.inbox.get(timeout=timeout)
        except queue.Empty:
            return
        self.last_progress = time.monotonic()
        for _ in range(DRAIN):
            self._handle(source, message)
            try:
                source, message = self.inbox.get_nowait()
            except queue.Empty:
                return
        self._handle(source, message)

    def _handle(self, source: int, message: Message) -> None:
        handler = self.handlers.get(type(message))
        if handler is None:
            raise AssertionError(f"the controller cannot handle {message!r}")
        handler(source, message)


def named(ranks: Sequence[int]) -> str:
    """` on rank 3`, ` on ranks 3, 4 and 90 more`; empty for nobody."""
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    return f" on rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
