"""Which engines can take part in a transfer of weights, and which version each serves.

    serving ──EngineFailed──► down ──EngineRestored──► behind ──loaded──► serving
       └──not stopped, or not answered, in time──► stalled ──a sign of life──► behind

An engine of several ranks is what its ranks are together; its first rank stands for it. While an engine is down or
stalled, and until it serves the current version again, it gets no new groups.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

SHOWN_ENGINES = 4


@dataclass(eq=False)
class EngineRecord:
    """One engine."""

    ranks: tuple[int, ...]
    served: int
    """Version that it serves; -1: none."""
    down_since: float | None = None
    """It is being built anew (monotonic seconds)."""
    stalled_since: float | None = None
    silent: set[int] = field(default_factory=set)
    """Ranks that were waited for in vain and have not said anything since."""
    reason: str = ""
    is_available: bool = True
    """It may get new groups."""

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def since(self) -> float | None:
        """Since when it takes part in nothing; None while it does."""
        return self.stalled_since if self.down_since is None else self.down_since

    @property
    def state(self) -> str:
        """Why it takes part in nothing, for texts."""
        return "is silent" if self.down_since is None else "is being built anew"


def not_told(leader: int, is_available: bool) -> None:
    """Nobody assigns groups."""


class EngineRoster:
    """Belongs to the controller's thread. `tell` hears which leaders may get new groups, and which not."""

    def __init__(self, instances: Iterable[Sequence[int]], version: int) -> None:
        self.engines = [EngineRecord(tuple(ranks), version) for ranks in instances]
        self.by_rank = {rank: engine for engine in self.engines for rank in engine.ranks}
        self.tell: Callable[[int, bool], None] = not_told

    def behind(self, version: int) -> list[EngineRecord]:
        """Engines that stand and do not serve this version."""
        return [engine for engine in self.engines if engine.since is None and engine.served != version]

    def fail(self, rank: int, reason: str) -> None:
        engine = self.by_rank[rank]
        engine.down_since, engine.served, engine.reason = engine.down_since or time.monotonic(), -1, reason
        self._set_available(engine, False)

    def restore(self, rank: int) -> None:
        """It stands again, without the current weights. Whoever was silent is heard of with it."""
        engine = self.by_rank[rank]
        engine.down_since = engine.stalled_since = None
        engine.silent.clear()

    def stall(self, engine: EngineRecord, ranks: Iterable[int], reason: str) -> None:
        """These ranks of it were waited for in vain."""
        engine.silent.update(ranks)
        engine.stalled_since, engine.reason = engine.stalled_since or time.monotonic(), reason
        logger.warning("the engine of rank %d is left out for now: %s", engine.leader, reason)
        self._set_available(engine, False)

    def hear(self, rank: int) -> None:
        """A rank has answered, however late."""
        engine = self.by_rank[rank]
        engine.silent.discard(rank)
        if not engine.silent and engine.stalled_since is not None:
            logger.info("the engine of rank %d is heard of again", engine.leader)
            engine.stalled_since = None

    def serve(self, engine: EngineRecord, version: int) -> None:
        engine.served = version
        if engine.since is None:
            self._set_available(engine, True)

    def available(self) -> list[int]:
        """Leaders that may get new work."""
        return [engine.leader for engine in self.engines if engine.is_available]

    def down(self) -> list[int]:
        """All ranks of the engines that are being built anew."""
        return [rank for engine in self.engines if engine.down_since is not None for rank in engine.ranks]

    def away_for(self, seconds: float) -> EngineRecord | None:
        """One that has taken part in nothing for longer than this."""
        limit = time.monotonic() - seconds
        return next((engine for engine in self.engines if engine.since is not None and engine.since < limit), None)

    def describe(self) -> str:
        """Engines that take part in nothing, and since when; empty when there is none."""
        now = time.monotonic()
        away = [
            f"rank {engine.leader} {engine.state} for {now - engine.since:.0f} s"
            for engine in self.engines
            if engine.since is not None
        ]
        more = f" and {len(away) - SHOWN_ENGINES} more" if len(away) > SHOWN_ENGINES else ""
        return f"engines left out: {', '.join(away[:SHOWN_ENGINES])}{more}" if away else ""

    def _set_available(self, engine: EngineRecord, is_available: bool) -> None:
        if engine.is_available != is_available:
            engine.is_available = is_available
            self.tell(engine.leader, is_available)
