"""Workflows that fail."""

from __future__ import annotations

from typing import Any


class BrokenWorkflow:
    """Raises in every episode."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def arun_episode(self, engine: Any, example: Any) -> None:
        raise RuntimeError("this workflow is broken")


class UnbuildableWorkflow:
    """Raises when it is built: on the rollout ranks, while the trainer loads its model."""

    def __init__(self, context: Any) -> None:
        raise RuntimeError("cannot build this workflow")
