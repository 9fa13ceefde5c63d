"""A workflow that throws away every second prompt."""

from __future__ import annotations

from typing import Any

from pekoe.pipeline.rollout.workflows.rlvr_workflow import RlvrWorkflow


class HalfOfThem(RlvrWorkflow):
    async def arun_episode(self, engine: Any, example: Any) -> Any:
        return None if example.index % 2 else await super().arun_episode(engine, example)
