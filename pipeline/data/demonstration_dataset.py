"""Demonstrations for task sft: chats, or prompts with completions, as JSON lines or in the layouts of `rows.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.data.rows import Row, read_rows
from pekoe.pipeline.records import Example

ARGUMENTS = ("subset", "loss_on", "template_args")
"""Keys of `args`; `loss_on` and `template_args` are the encoder's."""


class DemonstrationDataset:
    """Rows with `messages` (a chat), or with `prompt` and `completion`: both text, or both lists of messages.

    Text is taken as it is, messages go through the chat template. An example holds the messages of the prompt (of the
    whole chat for `messages`), and in `data` `completion` (text or messages) with, for text, `prompt`.
    """

    def __init__(self, config: DatasetConfig) -> None:
        refuse_unknown(config, "demonstrations", ARGUMENTS)
        self._rows = read_rows(config.path, config.split, config.args.get("subset"))
        self._name = Path(config.path).stem
        for number, row in enumerate(self._rows):
            if not is_chat(row.get("messages")) and not _is_completed(row):
                raise ValueError(
                    f"path: row {number} of {config.path!r} has neither messages nor prompt and completion (text, or "
                    "messages with role and content)"
                )
        refuse_text_with_system_prompt(config, any(isinstance(row.get("prompt"), str) for row in self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row, name = self._rows[index], f"{self._name}/{index}"
        if is_chat(row.get("messages")):
            return Example(index, name, as_chat(row["messages"]), {})
        if isinstance(row["prompt"], str):
            return Example(index, name, (), {"prompt": row["prompt"], "completion": row["completion"]})
        return Example(index, name, as_chat(row["prompt"]), {"completion": as_chat(row["completion"])})


def refuse_unknown(config: DatasetConfig, kind: str, allowed: tuple[str, ...]) -> None:
    """ValueError for keys of `args` that this kind of data set does not know."""
    unknown = set(config.args) - set(allowed)
    if unknown:
        raise ValueError(f"args: {sorted(unknown)} not known for {kind}; allowed: {', '.join(allowed)}")


def refuse_text_with_system_prompt(config: DatasetConfig, has_text: bool) -> None:
    """Text is no chat that a system message could stand before."""
    if has_text and config.system_prompt is not None:
        raise ValueError("system_prompt: needs messages; allowed for prompts of plain text: null")


def is_chat(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Whether it is a list of messages with role and content, at least one."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )


def as_chat(messages: list[dict[str, Any]]) -> tuple[dict[str, str], ...]:
    """Role and content alone."""
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _is_completed(row: Row) -> bool:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str):
        return isinstance(completion, str)
    return is_chat(prompt) and is_chat(completion)
