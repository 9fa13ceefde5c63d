"""Giving an engine's answer to the asyncio loop that waits for it."""

from __future__ import annotations

import asyncio

from pekoe.pipeline.rollout.engine import Response


def deliver(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Response], outcome: Response | BaseException
) -> None:
    """Resolves a future on its own loop, from any thread; nobody waits any more when that loop is closed."""

    def resolve() -> None:
        if future.done():
            return
        if isinstance(outcome, Response):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    try:
        loop.call_soon_threadsafe(resolve)
    except RuntimeError:
        if not loop.is_closed():
            raise
