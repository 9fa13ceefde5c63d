"""One completion under way: its tokens, what the cache holds of it, and its own stream of random numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pekoe.pipeline.records import Finish
from pekoe.pipeline.rollout.engine import GenerationRequest, Response
from pekoe.pipeline.rollout.engines.stop_check import StopCheck

UNIFORM_BLOCK = 64


class UniformStream:
    """Numbers in [0, 1), the n-th a function of the seed alone (Philox counter); 24 bits each, exact in float32."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))
        self._block: list[float] = []

    def __call__(self) -> float:
        if not self._block:
            self._block = self._generator.random(UNIFORM_BLOCK, dtype=np.float32).tolist()[::-1]
        return self._block.pop()


class SequenceState:
    """A request and what was sampled for it so far. Owned by the engine's thread; `cancelled` may be set by any."""

    def __init__(
        self, request: GenerationRequest, stop: StopCheck, deliver: Callable[[Response | BaseException], None]
    ) -> None:
        self.request = request
        self.stop = stop
        self.deliver = deliver
        self.uniform = UniformStream(request.seed)
        self.completion: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.cached = 0
        """Leading tokens whose keys and values are in the cache under the current weights."""
        self.cancelled = False
        self.finish: Finish | None = None

    @property
    def length(self) -> int:
        return len(self.request.tokens) + len(self.completion)

    @property
    def prompt_target(self) -> int:
        """Prompt tokens to cache before decoding: the last one is fed by the first decoding pass."""
        return len(self.request.tokens) - 1

    @property
    def last_token(self) -> int:
        return self.completion[-1] if self.completion else self.request.tokens[-1]

    def slice(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and completion."""
        prompt = len(self.request.tokens)
        return [*self.request.tokens[start:end], *self.completion[max(0, start - prompt) : max(0, end - prompt)]]

    def append(self, token: int, logprob: float, version: int) -> None:
        self.cached += 1
        self.completion.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.finish = self.stop.finish(self.completion)

    def response(self) -> Response:
        assert self.finish is not None
        return Response(
            tokens=np.array(self.completion, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish=self.finish,
        )
