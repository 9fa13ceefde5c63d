"""When a completion ends: end tokens, stop tokens, stop strings, and the room that is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pekoe.pipeline.records import Finish

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MARGIN = 4
"""Tokens decoded before the stop string's own: a window may begin inside a character or lose a leading space."""


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The model's own end tokens: of its generation config, else of its config; with the tokenizer's."""
    found: set[int] = set()
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
            break
    ids = getattr(tokenizer, "eos_token_id", None)
    if isinstance(ids, int):
        found.add(ids)
    return frozenset(found)


class StopCheck:
    """Judges a completion after every token; the token that ends it is kept.

    A stop string is searched in the decoded text of the completion alone, and only as far back as it can reach (a token
    is at least one byte), so the cost per token does not grow with the completion.
    """

    def __init__(
        self, token_ids: frozenset[int], strings: Sequence[str], min_new: int, max_new: int,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:  # fmt: skip
        if strings and decode is None:
            raise ValueError("gconfig.stop: stop strings need an engine with a tokenizer")
        if any(not string for string in strings):
            raise ValueError("gconfig.stop: an empty string would end every completion; allowed: non-empty strings")
        self.token_ids = token_ids
        self.min_new = min_new
        self.max_new = max_new
        self._strings = tuple(strings)
        self._decode = decode
        self._window = max((len(string.encode()) for string in strings), default=0) + MARGIN

    def finish(self, completion: Sequence[int]) -> Finish | None:
        """Why the completion ends with its last token, or None."""
        count = len(completion)
        if count > self.min_new and completion[-1] in self.token_ids:
            return Finish.STOP
        if self._strings and count >= self.min_new and self._completes_string(completion):
            return Finish.STOP
        return Finish.LENGTH if count >= self.max_new else None

    def _completes_string(self, completion: Sequence[int]) -> bool:
        assert self._decode is not None
        window = completion[-self._window :]
        text = self._decode(window)
        if not any(string in text for string in self._strings):
            return False
        before = common_prefix(self._decode(window[:-1]), text)
        return any(text.find(string, max(0, before - len(string) + 1)) >= 0 for string in self._strings)


def common_prefix(first: str, second: str) -> int:
    """Number of leading characters that two texts share."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
