"""`train_dataset` and `valid_dataset`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pekoe.pipeline.config.fields import setting


@dataclass
class DatasetConfig:
    """A source of examples."""

    type: str = setting(
        "gsm8k",
        "a registered dataset: gsm8k, reasoning_gym, jsonl; demonstrations (task sft), preferences (tasks dpo, rw), or "
        "module:Class",
    )
    path: str = setting("", "file or folder; for reasoning_gym the task's name")
    split: str = setting("train", "split of a Hugging Face folder")
    args: dict[str, Any] = setting(dict, "keyword arguments of the dataset (e.g. a reasoning-gym task's options)")
    size: int | None = setting(None, "examples to generate or to keep; null = all", minimum=1)
    seed: int = setting(0, "seed of a generated dataset")
    batch_size: int = setting(8, "prompts (tasks sft, dpo, rw: examples) per training step", minimum=1)
    shuffle: bool = setting(True, "a new order each epoch")
    prompt_template: str | None = setting(None, "text with {question}; null = the question as it is")
    system_prompt: str | None = setting(None, "system message put before each prompt")
    max_length: int | None = setting(
        None,
        "prompts with more tokens are left out and counted (tasks sft, dpo, rw: sequences are cut there)",
        minimum=1,
    )
