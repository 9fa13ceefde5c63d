"""Where the time of a rank's start-up goes: one line in its log when the world is formed, one for each slow load."""

from __future__ import annotations

import threading
import time

import psutil  # type: ignore[import-untyped]

SLOW_PHASES = ("loading", "forming", "verifying")
"""How phases begin that belong to the start of a role; their time is logged when they end."""

SHORT_SECONDS = 0.5
"""What took less is not worth a line."""


class StartUpTimes:
    """Notes phases from the start of the process. Any thread; seconds since 1970, since the process began before
    this."""

    def __init__(self, began: float | None = None) -> None:
        self.began = psutil.Process().create_time() if began is None else began
        self._lock = threading.Lock()
        self._since = self.began
        self._phase = "interpreter and imports"
        self._spent: dict[str, float] = {}
        self._threads: dict[str, tuple[str, float]] = {}

    def enter(self, phase: str, now: float | None = None) -> None:
        """The process goes on to another phase."""
        at = time.time() if now is None else now
        with self._lock:
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + at - self._since
            self._phase, self._since = phase, at

    def sentence(self, now: float | None = None) -> str:
        """`start-up took 3.2 s: interpreter and imports 0.9, preparing 1.1, mpi init 1.2`."""
        at = time.time() if now is None else now
        with self._lock:
            spent = {**self._spent, self._phase: self._spent.get(self._phase, 0.0) + at - self._since}
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in spent.items() if seconds >= 0.05)
        return f"start-up took {at - self.began:.1f} s: {parts}"

    def thread_enters(self, who: str, phase: str, now: float | None = None) -> str | None:
        """A thread goes on to another phase; a sentence about the one that ended, if that was part of its start."""
        at = time.time() if now is None else now
        with self._lock:
            before, since = self._threads.get(who, ("", at))
            if phase == before:
                return None
            self._threads[who] = (phase, at)
        if not before.startswith(SLOW_PHASES) or at - since < SHORT_SECONDS:
            return None
        return f"{who}: {before} took {at - since:.1f} s"
