"""One sequence in vLLM's batch, as the sampler sees it."""

from __future__ import annotations

from pekoe.pipeline.rollout.engines.sequence_state import UniformStream
from pekoe.pipeline.rollout.engines.vllm.commands import Add


class BatchRow:
    """What was asked for and what was sampled so far; equal on all ranks of an instance."""

    def __init__(self, add: Add) -> None:
        self.add = add
        self.completion: list[int] = []
        self.key = ""
        """vLLM's name for it: another one each time that it enters the batch."""
        self._stream = UniformStream(add.request.seed)
        self._uniform: float | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return [*self.add.request.tokens, *self.completion]

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        return self.add.room - len(self.completion)

    @property
    def uniform(self) -> float:
        """The number that draws the next token: the same until one is appended, however often it is computed."""
        if self._uniform is None:
            self._uniform = self._stream()
        return self._uniform

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that may not be sampled next."""
        return self.add.end_ids if len(self.completion) < self.add.request.sampling.min_new_tokens else ()

    def append(self, token: int) -> None:
        self.completion.append(token)
        self._uniform = None
