"""The dataset protocol, and the one place where size, prompt template and system prompt are applied.

A registered class is built as `cls(config)` and gives the examples as the source has them; `build` puts what the
configuration asks for around it. Everything is deterministic, so that all ranks see the same rows without talking.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.prompts import prompt_ids
from pekoe.pipeline.records import Example
from pekoe.pipeline.registry import DATASETS, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = "{question}"


class Dataset(Protocol):
    """A finite sequence of examples; the same index gives the same example on every rank and in every attempt."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


class PromptedDataset:
    """The first `size` rows of a dataset with the template around the last user message and a system message before
    all."""

    def __init__(self, source: Dataset, config: DatasetConfig) -> None:
        self._source = source
        self._template = config.prompt_template
        self._system = config.system_prompt
        self._length = len(source) if config.size is None else min(config.size, len(source))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._length:
            raise IndexError(f"example {index} of {self._length}")
        example = self._source[index]
        messages = list(example.messages)
        if self._template is not None:
            last = max(i for i, message in enumerate(messages) if message["role"] == "user")
            messages[last] = {"role": "user", "content": self._template.replace(QUESTION, messages[last]["content"])}
        if self._system is not None:
            messages = [{"role": "system", "content": self._system}, *(m for m in messages if m["role"] != "system")]
        return dataclasses.replace(example, index=index, messages=tuple(messages))


class SelectedDataset:
    """Some rows of a dataset, numbered anew from 0; names stay."""

    def __init__(self, source: Dataset, rows: Sequence[int]) -> None:
        self._source = source
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self._rows):
            raise IndexError(f"example {index} of {len(self._rows)}")
        return dataclasses.replace(self._source[self._rows[index]], index=index)


def build(config: DatasetConfig, key: str = "train_dataset") -> Dataset:
    """The dataset of a configuration section; `key` names the section in errors.

    Raises ValueError when the type is not known, the template lacks `{question}`, or there is no example.
    """
    if config.prompt_template is not None and QUESTION not in config.prompt_template:
        raise ValueError(f"{key}.prompt_template: {config.prompt_template!r} does not contain {QUESTION}")
    dataset_class = resolve(DATASETS, config.type, f"{key}.type")
    try:
        source: Dataset = dataset_class(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: {error}") from error
    if len(source) == 0:
        raise ValueError(f"{key}.path: {config.path!r} holds no example")
    if config.prompt_template is not None and all(m["role"] != "user" for m in source[0].messages):
        raise ValueError(f"{key}.prompt_template: {source[0].name} has no user message to put it around")
    return PromptedDataset(source, config)


def filter_by_length(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[Dataset, int]:
    """Leaves out prompts of more than `limit` tokens; gives the rest and how many were left out.

    Raises ValueError when nothing is left.
    """
    lengths = [len(prompt_ids(tokenizer, dataset[index].messages, template_args)) for index in range(len(dataset))]
    rows = [index for index, length in enumerate(lengths) if length <= limit]
    if not rows:
        raise ValueError(f"max_length: {limit} leaves no example; the shortest prompt has {min(lengths)} tokens")
    num_left_out = len(lengths) - len(rows)
    return (SelectedDataset(dataset, rows), num_left_out) if num_left_out else (dataset, 0)
