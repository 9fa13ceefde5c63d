"""What a user brings to the chaos benchmark: a workflow that filters every fifth prompt, and a reward."""

from __future__ import annotations

from typing import Any

from pekoe.pipeline.rollout.workflows.rlvr_workflow import RlvrWorkflow

FILTERED_EVERY = 5


def is_filtered(example: int) -> bool:
    return example % FILTERED_EVERY == 0


class FourOfFive(RlvrWorkflow):
    """Declines some prompts, always the same ones."""

    async def arun_episode(self, engine: Any, example: Any) -> Any:
        return None if is_filtered(example.index) else await super().arun_episode(engine, example)


def digit_share(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """The share of digits in the completion."""
    return sum(character.isdigit() for character in completions) / max(len(completion_ids), 1)
