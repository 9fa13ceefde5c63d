"""Two ranks that try things on each other's files, and all ranks that keep step with them, for `pekoe doctor`.

Every call is made by all ranks in the same order. What one rank does may fail there; the others learn of it, and
nobody waits for a rank that has gone another way.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

WRITER = 0
POLL_SECONDS = 0.002


class Peers(Protocol):
    """What is needed of a world: the values of one rank, or of each, for all."""

    @property
    def rank(self) -> int: ...
    def share(self, value: Any, root: int = 0) -> Any: ...
    def collect(self, value: Any) -> list[Any]: ...


class Done(NamedTuple):
    """What became of something that one rank did."""

    value: Any
    error: str = ""
    """`ENOLCK: No locks available`, or "" when it went well."""

    @property
    def code(self) -> str:
        """The name of the error alone."""
        return self.error.partition(":")[0]


class Pair:
    """Rank 0 writes, the watcher (on another node where there is one) looks; all others listen."""

    def __init__(self, peers: Peers, watcher: int) -> None:
        self.peers = peers
        self.watcher = watcher

    def writer_does(self, action: Callable[[], Any]) -> Done:
        return self._does(action, WRITER)

    def watcher_does(self, action: Callable[[], Any]) -> Done:
        return self._does(action, self.watcher)

    def together(self, writer: Callable[[], Any], watcher: Callable[[], Any]) -> tuple[Done, Done]:
        """Both at the same time; what each came to."""
        mine: Done = Done(None)
        self.peers.collect(None)
        if self.peers.rank == WRITER:
            mine = attempt(writer)
        elif self.peers.rank == self.watcher:
            mine = attempt(watcher)
        everybody = self.peers.collect(list(mine))
        return Done(*everybody[WRITER]), Done(*everybody[self.watcher])

    def _does(self, action: Callable[[], Any], rank: int) -> Done:
        mine = attempt(action) if self.peers.rank == rank else None
        return Done(*self.peers.share(None if mine is None else list(mine), rank))


def attempt(action: Callable[[], Any]) -> Done:
    """Does it; an error of the operating system or of a library is an answer, too."""
    try:
        return Done(action())
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return Done(None, f"{name}: {error.strerror or error}")
    except Exception as error:
        return Done(None, f"{type(error).__name__}: {error}")


def seconds_until(condition: Callable[[], object], most: float) -> float | None:
    """How long it took until it was true; None when it was not within `most` seconds."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > most:
            return None
        time.sleep(POLL_SECONDS)
    return time.monotonic() - began
