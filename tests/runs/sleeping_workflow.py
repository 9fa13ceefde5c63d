"""A workflow that waits: nothing to decode, nothing to train."""

from __future__ import annotations

import asyncio
from typing import Any


class SleepingWorkflow:
    """Every episode waits for ten minutes."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def arun_episode(self, engine: Any, example: Any) -> None:
        await asyncio.sleep(600)
