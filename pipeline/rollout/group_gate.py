"""Bounds how many episodes run at once, by whole groups: the episodes of a group start together."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class GroupGate:
    """First come, first served. A group larger than the limit runs when it is alone. Belongs to one loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        """Groups that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[None]:
        """Waits for `count` places and gives them back at the end."""
        entry = (count, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._admit()
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()
            else:
                self._leave(count)
            raise
        try:
            yield
        finally:
            self._leave(count)

    def _leave(self, count: int) -> None:
        self.num_running -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            count, place = self._waiting[0]
            if self.num_running and self.num_running + count > self._limit:
                return
            self._waiting.popleft()
            self.num_running += count
            if not place.done():
                place.set_result(None)
