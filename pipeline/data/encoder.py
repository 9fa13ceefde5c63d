"""From examples to labelled tokens: one sequence for task sft, two for a pair; what does not train is told why.

Prompt tokens are never labelled. A sequence ends with its last labelled token: what a template puts behind it is
neither trained on nor scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pekoe.pipeline.data.assistant_spans import Template
from pekoe.pipeline.data.preference_dataset import HUMAN, TURN
from pekoe.pipeline.records import Example, Int32, UInt8

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOSS_ON = ("all", "last")
NO_LABEL, EQUAL_SIDES = "no_label", "equal_sides"
"""Why an example does not train: the length limit leaves nothing to learn, or both sides of a pair are the same."""

Labelled = tuple[Int32, UInt8]
"""Tokens [T] and labels [T] (1 = trained on); the first token is never labelled."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example as sequences: one, or chosen and rejected."""

    sequences: tuple[Labelled, ...]
    """Empty when it does not train."""
    dropped: str = ""
    num_truncated: int = 0
    """Sequences that were cut at the limit."""


class Encoder:
    """Knows tokenizer, length limit and the data set's `args`; the same example gives the same tokens everywhere."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, limit: int, is_pair: bool, arguments: Mapping[str, Any]
    ) -> None:
        """`limit`: most tokens of a sequence; longer ones are cut at their end. `arguments`: `loss_on` (all turns of
        the assistant, or the last), `template_args` of the chat template. ValueError names what is not allowed."""
        self._tokenizer, self._limit, self._is_pair = tokenizer, limit, is_pair
        self._loss_on = arguments.get("loss_on", "all")
        if self._loss_on not in LOSS_ON:
            raise ValueError(f"args.loss_on: {self._loss_on!r} is not allowed; allowed: {', '.join(LOSS_ON)}")
        self._template = Template(tokenizer, arguments.get("template_args")) if tokenizer.chat_template else None

    def encode(self, example: Example) -> Encoded:
        """Raises ValueError naming the example when it is not of the task's kind, or cannot be rendered."""
        try:
            whole = [self._sequence(example, side) for side in self._sides(example)]
        except ValueError as error:
            raise ValueError(f"example {example.name}: {error}") from error
        cut = [(tokens[: self._limit], labels[: self._limit]) for tokens, labels in whole]
        num_truncated = sum(len(tokens) > self._limit for tokens, _ in whole)
        if any(not labels.any() for _, labels in cut):
            return Encoded((), NO_LABEL, num_truncated)
        if self._is_pair and np.array_equal(cut[0][0], cut[1][0]):
            return Encoded((), EQUAL_SIDES, num_truncated)
        return Encoded(tuple(cut), "", num_truncated)

    def _sides(self, example: Example) -> list[Any]:
        """The completion of each sequence; None: the messages of the example are all there is."""
        if self._is_pair:
            if not {"chosen", "rejected"} <= set(example.data):
                raise ValueError("has no chosen and rejected side; take train_dataset.type: preferences")
            return [example.data["chosen"], example.data["rejected"]]
        if "completion" in example.data:
            return [example.data["completion"]]
        if any(message["role"] == "assistant" for message in example.messages):
            return [None]
        raise ValueError("has nothing to learn: no message of the assistant, no completion")

    def _sequence(self, example: Example, completion: Any) -> Labelled:
        if isinstance(completion, str):
            return _trimmed(*self._text(str(example.data["prompt"]), completion))
        messages = [*example.messages, *(completion or ())]
        first = len(example.messages) if completion is not None else 0
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not turns:
            raise ValueError("has no message of the assistant in its completion")
        if not self._is_pair and self._loss_on == "last":
            turns = turns[-1:]
        return _trimmed(*self._chat(messages, turns))

    def _chat(self, messages: Sequence[Mapping[str, str]], turns: Sequence[int]) -> tuple[list[int], list[int]]:
        if self._template is None:
            if list(turns) != [len(messages) - 1]:
                raise ValueError(
                    "more than one turn of the assistant needs a tokenizer with a chat template; this one has none"
                )
            prompt = "\n\n".join(message["content"] for message in messages[:-1])
            return self._text(prompt, messages[-1]["content"])
        text, spans = self._template.spans(messages, turns)
        found: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), _labels(text, spans, found["offset_mapping"])

    def _text(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """The prompt is encoded by itself, as before sampling. Sides of a pair that part before the last turn hold
        turns of people: these are not labelled."""
        tokens = list(self._tokenizer.encode(prompt))
        end = self._tokenizer.eos_token_id
        if tokens and tokens[-1] == end:
            tokens.pop()
        labels = [0] * len(tokens)
        is_own = True
        for piece in TURN.split(completion) if self._is_pair else [completion]:
            is_mark = TURN.fullmatch(piece) is not None
            if is_mark:
                is_own = piece != HUMAN
            ids = self._tokenizer.encode(piece, add_special_tokens=False) if piece else []
            tokens += ids
            labels += [int(is_own and not is_mark)] * len(ids)
        if is_own and end is not None:
            tokens.append(end)
            labels.append(1)
        return tokens, labels


def _labels(text: str, spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """A token with anything of a span in it is the assistant's if nothing but white space of the rest is in it, too;
    ValueError where it holds more of both."""
    labels = [0] * len(offsets)
    spans_left = [(begin, end) for begin, end in spans if begin < end]
    for i, (begin, end) in enumerate(offsets):
        begin = min(begin, max(end - 1, 0))  # tokenizers that trim offsets leave a token of spaces without length
        while spans_left and begin >= spans_left[0][1]:
            spans_left.pop(0)
        if not spans_left or end <= spans_left[0][0]:
            continue
        first, last = spans_left[0]
        if (text[begin:first] + text[last:end]).strip():
            own = text[max(begin, first) : min(end, last)]
            raise ValueError(
                f"the token {text[begin:end]!r} is partly the assistant's ({own!r}) and partly the chat template's: it "
                "can be neither labelled nor left out"
            )
        labels[i] = 1
    return labels


def _trimmed(tokens: list[int], labels: list[int]) -> Labelled:
    """Up to the last label; nothing predicts the first token."""
    marks = np.array(labels, dtype=np.uint8)
    marks[:1] = 0
    last = int(np.flatnonzero(marks)[-1]) + 1 if marks.any() else len(marks)
    return np.array(tokens[:last], dtype=np.int32), marks[:last]
