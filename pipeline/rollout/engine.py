"""The inference-engine protocol: what a workflow and the weight receiver may ask of any engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pekoe.pipeline.records import Finish, Float32, Int32

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How one completion is sampled; see `gconfig` for the meaning of each."""

    max_new_tokens: int = 512
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion of one prompt. Requests with equal prompts that wait together share the prefill."""

    tokens: tuple[int, ...]
    """Prompt ids."""
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    seed: int = 0
    """Same seed, same weights, same prompt: same completion."""
    group: int = -1
    """Admission number; in deterministic mode the `group_size` requests of a group are decoded as one batch."""
    sample: int = 0
    group_size: int = 1
    min_version: int = 0
    """The request waits until the engine's weights are at least this old."""


@dataclass(frozen=True, slots=True)
class Response:
    """A completion: only the sampled tokens, the stop token included."""

    tokens: Int32  # [T]
    logprobs: Float32  # [T] at the sampling temperature, of the full distribution (before top-p / top-k)
    versions: Int32  # [T]
    finish: Finish


class InferenceEngine(Protocol):
    """One engine owns one thread (or process) that decodes; all methods are thread-safe."""

    async def generate(self, request: GenerationRequest) -> Response:
        """Cancelling the task aborts the request and frees its slot. Zero room gives an empty LENGTH response."""
        ...

    def pause(self) -> None:
        """Returns when decoding has stopped at a token; unfinished sequences are kept. Nested calls are an error."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Paused only. Names must equal the model's Hugging Face names, else ValueError naming the difference.

        Drops every derived copy and the KV cache. After an exception the engine serves nothing until a full load."""
        ...

    def resume(self) -> None:
        """Recomputes KV and goes on with the same sequences; new tokens carry the new version."""
        ...

    def sleep(self) -> None:
        """Paused only: frees the KV cache (and weights, where that pays)."""
        ...

    def wake(self) -> None: ...

    def logprobs(self, sequences: list[Int32]) -> list[Float32]:
        """Token-aligned log-probs [T] (first is 0) at temperature 1 of given sequences. Paused only."""
        ...

    def gauges(self) -> dict[str, float]:
        """`running`, `waiting`, `tokens` sampled so far, `version`, … for heartbeats and metrics.

        The watchdog expects `tokens` or `prefilled_tokens` to grow while there are `running` ones and `serving` is
        not 0."""
        ...

    def close(self) -> None: ...
