"""What `rollout.keep_trajectories` does with shards that nobody needs any more, once a checkpoint covers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.archive import Archive
from pekoe.pipeline.trajectory.store import Store

CLOSE_SECONDS = 50.0
"""At the end of an attempt; what is not archived by then stays as it is, and the next attempt goes on with it."""


class SpentShards(Protocol):
    """Each call may raise OSError: then it is made again with the same shards and more, gone ones among them."""

    def take(self, consumed: Sequence[str], unused: Sequence[str]) -> None:
        """`consumed`: shards that were trained on; `unused`: shards whose groups all came too late."""
        ...

    def close(self) -> None: ...


class Deleted:
    """`none`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def take(self, consumed: Sequence[str], unused: Sequence[str]) -> None:
        self._store.collect([*consumed, *unused])

    def close(self) -> None:
        """Nothing waits."""


class Archived:
    """`archive`: put together in few large files, on a thread of the archive's own."""

    def __init__(self, run: RunDirectory, store: Store) -> None:
        self._archive = Archive(run)
        self._store = store

    def take(self, consumed: Sequence[str], unused: Sequence[str]) -> None:
        self._archive.add(consumed)
        self._store.collect(unused)

    def close(self) -> None:
        self._archive.close(CLOSE_SECONDS)


class Kept:
    """`shards`: they stay where they are."""

    def take(self, consumed: Sequence[str], unused: Sequence[str]) -> None:
        """Nothing is done."""

    def close(self) -> None:
        """Nothing waits."""


def spent_shards(keep_trajectories: str, run: RunDirectory, store: Store) -> SpentShards:
    """What the configuration asks for."""
    match keep_trajectories:
        case "archive":
            return Archived(run, store)
        case "shards":
            return Kept()
        case _:
            return Deleted(store)
