"""When is an engine's process stuck? Time limits, and the judge of what it reports of itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Seconds. What takes longer is a stall: the process is killed, and its engine has failed."""

    start: float = 600.0
    """From the start of the process to the engine that can serve."""
    answer: float = 120.0
    """pause (which waits for the token being computed), resume, sleep, wake, logprobs, load_adapter."""
    drain: float = 600.0
    """pause with `drain`: the sequences under way are finished."""
    bucket: float = 120.0
    """A bucket of weights is read, and the load ends after the last one."""
    silence: float = 60.0
    """Without a word of the process, which reports its gauges all the time once it has imported what it needs."""
    progress: float = 1800.0
    """Without a token while there are sequences to decode."""
    close: float = 10.0
    """For an orderly end."""


class SilenceWatch:
    """What was heard of one process, and when."""

    def __init__(self, limits: ChildLimits) -> None:
        self._limits = limits
        self._heard = self._moved = time.monotonic()
        self._counter = -1.0
        self._has_spoken = False

    def heard(self, gauges: Mapping[str, float] | None = None) -> None:
        """A word of the process, perhaps with its gauges."""
        self._heard, self._has_spoken = time.monotonic(), True
        if gauges is None:
            return
        counter = gauges.get("tokens", 0.0) + gauges.get("prefilled_tokens", 0.0)
        is_decoding = bool(gauges.get("running", 0.0)) and bool(gauges.get("serving", 1.0))
        if counter != self._counter or not is_decoding:
            self._counter, self._moved = counter, self._heard

    def stood_still(self, seconds: float) -> None:
        """This process itself did not run for so long (its job was suspended, its node stalled): nor did the other."""
        self._heard += seconds
        self._moved += seconds

    def judge(self) -> str:
        """Why the process counts as stuck; empty when it does not."""
        now = time.monotonic()
        limit = self._limits.silence if self._has_spoken else self._limits.start
        if now - self._heard > limit:
            return f"was silent for {limit:g} s"
        if self._heard - self._moved > self._limits.progress:
            return f"sampled no token for {self._limits.progress:g} s with sequences under way"
        return ""
