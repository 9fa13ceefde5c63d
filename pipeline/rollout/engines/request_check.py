"""What every engine asks of a request before it takes it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pekoe.pipeline.rollout.engine import GenerationRequest
from pekoe.pipeline.rollout.engines.stop_check import StopCheck
from pekoe.pipeline.rollout.engines.token_sampler import check_sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RequestCheck:
    """The limits of one engine. Its own copy of the tokenizer decodes what stop strings are searched in."""

    def __init__(
        self, *, vocabulary: int, context_limit: int, end_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self._vocabulary = vocabulary
        self._context_limit = context_limit
        self._end_ids = end_ids
        self._tokenizer = None if tokenizer is None else copy.deepcopy(tokenizer)

    def stop_check(self, request: GenerationRequest, adapters: Sequence[str] = ()) -> StopCheck:
        """How the request ends; ValueError when it cannot be served. `adapters` are loaded."""
        sampling = request.sampling
        check_sampling(sampling, self._vocabulary)
        if not request.tokens:
            raise ValueError("request.tokens: the prompt is empty; allowed: at least one token")
        last = self._vocabulary - 1
        for token in (min(request.tokens), max(request.tokens)):
            if not 0 <= token <= last:
                raise ValueError(f"request.tokens: id {token} is not in the vocabulary; allowed: 0 to {last}")
        if request.seed < 0:
            raise ValueError(f"request.seed: {request.seed}; allowed: 0 or more")
        if request.adapter and request.adapter not in adapters:
            allowed = ", ".join(adapters) or "none is"
            raise ValueError(f"request.adapter: {request.adapter!r} is not loaded; allowed: {allowed}")
        room = min(sampling.max_new_tokens, self._context_limit - len(request.tokens))
        ids = (frozenset() if sampling.ignore_eos else self._end_ids).union(sampling.stop_token_ids)
        decode = None if self._tokenizer is None else self._decode
        return StopCheck(ids, sampling.stop, sampling.min_new_tokens, room, decode)

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
