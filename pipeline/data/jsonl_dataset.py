"""Any table of prompts: JSON lines, or the other layouts that `rows.py` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.data.rows import Row, read_rows
from pekoe.pipeline.records import Example

PROMPT_KEYS = ("messages", "prompt", "question")


class JsonlDataset:
    """Rows with `messages` (a chat), `prompt` (text or a chat) or `question` (text); every other key goes to the
    reward.

    `args.prompt_key` names another key for the prompt, `args.subset` a subset of a Hugging Face folder.
    """

    def __init__(self, config: DatasetConfig) -> None:
        unknown = set(config.args) - {"prompt_key", "subset"}
        if unknown:
            raise ValueError(f"args: {sorted(unknown)} not known for jsonl; allowed: prompt_key, subset")
        self._rows = read_rows(config.path, config.split, config.args.get("subset"))
        self._name = Path(config.path).stem
        chosen = config.args.get("prompt_key")
        self._keys = PROMPT_KEYS if chosen is None else (chosen,)
        for number, row in enumerate(self._rows):
            key = next((key for key in self._keys if row.get(key)), None)
            if key is None or not _is_prompt(row[key]):
                raise ValueError(
                    f"path: row {number} of {config.path!r} lacks a prompt; looked for {', '.join(self._keys)}"
                )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row = self._rows[index]
        data = {key: value for key, value in row.items() if key not in (*PROMPT_KEYS, *self._keys)}
        return Example(index, f"{self._name}/{index}", self._messages(row), data)

    def _messages(self, row: Row) -> tuple[dict[str, str], ...]:
        prompt = next(row[key] for key in self._keys if row.get(key))
        if isinstance(prompt, str):
            return ({"role": "user", "content": prompt},)
        return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )
