"""Preferences for tasks dpo and rw: a chosen and a rejected completion of one prompt.

HH-RLHF's rows (Bai et al. 2022, arXiv:2204.05862) hold two whole dialogues; their common beginning, up to an opening of
the assistant, is the prompt.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.data.demonstration_dataset import (
    as_chat,
    is_chat,
    refuse_text_with_system_prompt,
    refuse_unknown,
)
from pekoe.pipeline.data.rows import Row, read_rows
from pekoe.pipeline.records import Example

ARGUMENTS = ("subset", "dialogue", "template_args")
DIALOGUES = ("text", "chat")
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
TURN = re.compile(rf"({re.escape(HUMAN)}|{re.escape(ASSISTANT)})")


class PreferenceDataset:
    """Rows with `chosen` and `rejected`, and `prompt` where these do not repeat it.

    All text or all lists of messages. Without a `prompt` it is what both sides begin with: of text in HH-RLHF's format
    up to the last common "Assistant:", of messages the common ones. `args.dialogue: chat` makes messages of HH-RLHF's
    turns, for models with a chat template; `text` (default) takes them as they are. An example holds the messages of
    the prompt, and in `data` `chosen` and `rejected` (text or messages) with, for text, `prompt`.
    """

    def __init__(self, config: DatasetConfig) -> None:
        refuse_unknown(config, "preferences", ARGUMENTS)
        self._dialogue = config.args.get("dialogue", "text")
        if self._dialogue not in DIALOGUES:
            raise ValueError(f"args.dialogue: {self._dialogue!r} is not allowed; allowed: {', '.join(DIALOGUES)}")
        self._rows = read_rows(config.path, config.split, config.args.get("subset"))
        self._name = Path(config.path).stem
        self._path = config.path
        has_text = False
        for index in range(len(self._rows)):
            has_text |= not self[index].messages
        refuse_text_with_system_prompt(config, has_text)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row, name = self._rows[index], f"{self._name}/{index}"
        try:
            messages, data = self._sides(row)
        except ValueError as error:
            raise ValueError(f"path: row {index} of {self._path!r} {error}") from error
        return Example(index, name, messages, data)

    def _sides(self, row: Row) -> tuple[tuple[dict[str, str], ...], dict[str, object]]:
        prompt, chosen, rejected = (row.get(key) for key in ("prompt", "chosen", "rejected"))
        if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
            if self._dialogue == "text":
                text, sides = (prompt, (chosen, rejected)) if prompt is not None else _common_text(chosen, rejected)
                return (), {"prompt": text, "chosen": sides[0], "rejected": sides[1]}
            before = prompt or ""
            chats = [dialogue_messages(before + side) for side in (chosen, rejected)]
            return _common_messages(*chats)
        if is_chat(chosen) and is_chat(rejected) and (prompt is None or is_chat(prompt)):
            if prompt is None:
                return _common_messages(as_chat(chosen), as_chat(rejected))
            return as_chat(prompt), {"chosen": as_chat(chosen), "rejected": as_chat(rejected)}
        raise ValueError("lacks chosen and rejected (and prompt), all text or all messages with role and content")


def dialogue_messages(text: str) -> tuple[dict[str, str], ...]:
    """Messages of a dialogue in HH-RLHF's format. ValueError when it does not begin with a turn."""
    before, *parts = TURN.split(text)
    if before.strip() or not parts:
        raise ValueError(f"is no dialogue of {HUMAN!r} and {ASSISTANT!r} turns")
    roles = {HUMAN: "user", ASSISTANT: "assistant"}
    return tuple(
        {"role": roles[mark], "content": content.strip()} for mark, content in zip(parts[::2], parts[1::2], strict=True)
    )


def _common_text(chosen: str, rejected: str) -> tuple[str, tuple[str, str]]:
    """(prompt, completions): the prompt ends with an opening of the assistant that both sides have."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    at = chosen.rfind(ASSISTANT, 0, same)
    if at < 0:
        raise ValueError(f"has no prompt, and its sides have no common beginning that ends with {ASSISTANT!r}")
    end = at + len(ASSISTANT)
    return chosen[:end], (chosen[end:], rejected[end:])


def _common_messages(
    chosen: tuple[dict[str, str], ...], rejected: tuple[dict[str, str], ...]
) -> tuple[tuple[dict[str, str], ...], dict[str, object]]:
    """The messages that both sides begin with are the prompt; each side keeps at least its last one."""
    most = min(len(chosen), len(rejected)) - 1
    count = 0
    while count < most and chosen[count] == rejected[count]:
        count += 1
    if not count:
        raise ValueError("has no prompt, and its sides have no common first message")
    return chosen[:count], {"chosen": chosen[count:], "rejected": rejected[count:]}
