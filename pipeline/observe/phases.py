"""What the threads of a rank are doing: for each its phase, since when, for how long at most, and on whom it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pekoe.pipeline.messages import ThreadPhase

WAIT = "waiting"
"""A phase that begins so is a wait: the thread has nothing to do until somebody else has done something."""


class SetPhase(Protocol):
    """Says what a thread does now. Repeating a phase keeps its age; its limit and `on` may change meanwhile."""

    def __call__(
        self, phase: str, *, limit: float | None = None, on: Sequence[int] = (), moved: float | None = None
    ) -> None:
        """`limit` in seconds: after it somebody ends the run; `on`: the ranks that it waits for.

        `moved`: when there was progress last (`time.monotonic()`), from which the limit counts then.
        """
        ...


@dataclass
class _Thread:
    phase: str
    since: float
    limit: float | None
    on: tuple[int, ...]
    moved: float | None = None
    waited: float = 0.0
    """Seconds in waits that are over, since the shares were last asked for."""


class ThreadPhases:
    """One per rank; every method may be called from any thread. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._threads: dict[str, _Thread] = {}
        self._asked = clock()

    def set(
        self, who: str, phase: str, limit: float | None = None, on: Sequence[int] = (), moved: float | None = None
    ) -> str:
        """Returns what all threads do, in one line."""
        with self._lock:
            now = self._clock()
            thread = self._threads.get(who)
            if thread is None:
                self._threads[who] = _Thread(phase, now, limit, tuple(on), moved)
            else:
                if thread.phase != phase:
                    thread.waited += self._open_wait(thread, now)
                    thread.phase, thread.since = phase, now
                thread.limit, thread.on, thread.moved = limit, tuple(on), moved
            return "; ".join(f"{name}: {thread.phase}" for name, thread in self._threads.items())

    def now(self) -> tuple[ThreadPhase, ...]:
        """All threads, in the order of their first words."""
        with self._lock:
            now = self._clock()
            return tuple(
                ThreadPhase(
                    who, thread.phase, _age(now, thread.since), thread.limit, thread.on,
                    None if thread.moved is None else _age(now, max(thread.moved, thread.since)),
                )
                for who, thread in self._threads.items()
            )  # fmt: skip

    def of(self, who: str) -> str:
        """What one thread does; empty if it has said nothing."""
        with self._lock:
            thread = self._threads.get(who)
            return "" if thread is None else thread.phase

    def waiting_shares(self) -> dict[str, float]:
        """Per thread the share of its time in waits, 0 to 1, since this was last asked for."""
        with self._lock:
            now = self._clock()
            elapsed = now - self._asked
            shares = {}
            for who, thread in self._threads.items():
                waited = thread.waited + self._open_wait(thread, now)
                shares[who] = min(1.0, max(0.0, waited / elapsed)) if elapsed > 0 else 0.0
                thread.waited = 0.0
            self._asked = now
            return shares

    def _open_wait(self, thread: _Thread, now: float) -> float:
        """Seconds of the present wait that have not been counted yet."""
        return now - max(thread.since, self._asked) if thread.phase.startswith(WAIT) else 0.0


def _age(now: float, then: float) -> float:
    return round(max(0.0, now - then), 3)
