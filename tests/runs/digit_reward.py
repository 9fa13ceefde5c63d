"""A user's reward function with AReaL's signature: the share of digits in the completion."""

from __future__ import annotations

from typing import Any


def digit_share(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return sum(character.isdigit() for character in completions) / max(len(completion_ids), 1)
