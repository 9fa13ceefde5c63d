"""Times of functions that do the same work, in turns, in seconds of the processor.

For work of one thread: the process's own time is what it would take on an idle core, but for shared caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

SHORTEST = 0.02
"""Seconds that one measurement takes at least: faster functions are called several times."""


def seconds_in_turns(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of one call of each; a first call of each is not counted."""
    calls = {name: max(1, round(SHORTEST / max(_timed(function, 1), 1e-9))) for name, function in functions.items()}
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            found[name].append(_timed(function, calls[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def check(holds: bool, what: str) -> None:
    """A speed counts only behind this."""
    if not holds:
        raise AssertionError(f"not measured, since it is wrong: {what}")


def _timed(function: Callable[[], object], calls: int) -> float:
    started = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - started) / calls
