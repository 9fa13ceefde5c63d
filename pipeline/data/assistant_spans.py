"""Which characters of a rendered chat the assistant wrote: exact for each turn, or an error.

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
                                                        [---------------)

A span begins where the opening of the answer ends and includes the mark that ends the turn, as sampling gives them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_IN = "\ue000turn\ue001"
"""Takes the place of a turn's content to see where it goes: characters that no template touches."""

Messages = Sequence[Mapping[str, str]]


class Refused(ValueError):
    """The template renders no such chat: its own words say why."""


class Template:
    """A tokenizer's chat template, with the arguments that go to it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        added = [str(token) for token in tokenizer.get_added_vocab()]
        self._marks = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)

    def render(self, messages: Messages, opening: bool = False) -> str:
        """The text of a chat; `opening` adds that of an answer. Raises Refused where the template does."""
        from jinja2 import TemplateError

        try:
            text: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=opening,
                tokenize=False,
                **self._arguments,
            )
        except TemplateError as error:
            raise Refused(f"chat template: it refuses these messages: {error}") from error
        return str(text)

    def spans(self, messages: Messages, turns: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered chat, and the span [begin, end) of each of `turns` (places of assistant messages).

        Raises ValueError when the template refuses the chat, or does not show where a turn lies.
        """
        text = self.render(messages)
        spans = [self._span(messages, turn, text) for turn in turns]
        for (_, end), (begin, _) in itertools.pairwise(spans):
            if begin < end:
                raise ValueError("chat template: turns of the assistant overlap in what it renders")
        return text, spans

    def _span(self, messages: Messages, turn: int, text: str) -> tuple[int, int]:
        before = self._beginning(messages[:turn], text, opening=True)
        after = text if turn == len(messages) - 1 else self._beginning(messages[: turn + 1], text)
        inner = self._content_span(messages, turn, text) if before is None or after is None else None
        begin = len(before) if before is not None else inner[0] if inner else -1
        end = -1 if after is None else self._without_tail(text[:begin], after)
        if after is None and inner:
            end = inner[1] + self._mark_length(text[inner[1] :])
        if not 0 <= begin <= end:
            raise ValueError(f"chat template: what it renders does not show where message {turn} (assistant) lies")
        return begin, end

    def _beginning(self, messages: Messages, text: str, opening: bool = False) -> str | None:
        """What the template makes of the first messages of a chat, if `text` (the whole) begins with that; None, too,
        when it refuses them alone (a strict one asks for a turn of the user, say)."""
        if not messages:
            return None
        try:
            part = self.render(messages, opening)
        except Refused:
            return None
        return part if text.startswith(part) else None

    def _content_span(self, messages: Messages, turn: int, text: str) -> tuple[int, int] | None:
        """Where the content of a message lies, by rendering with something else in its place."""
        changed = [dict(message) for message in messages]
        changed[turn]["content"] = STAND_IN
        try:
            other = self.render(changed)
        except Refused:
            return None
        at = other.find(STAND_IN)
        tail = other[at + len(STAND_IN) :]
        if at < 0 or STAND_IN in tail or not text.startswith(other[:at]) or not text.endswith(tail):
            return None
        return at, len(text) - len(tail)

    def _without_tail(self, before: str, text: str) -> int:
        """The end of the turn that ends `text`: white space behind a mark belongs to the template."""
        stripped = text.rstrip()
        if len(stripped) > len(before) and any(stripped.endswith(mark) for mark in self._marks):
            return len(stripped)
        return len(text)

    def _mark_length(self, tail: str) -> int:
        return next((len(mark) for mark in self._marks if tail.startswith(mark)), 0)
