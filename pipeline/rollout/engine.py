"""The inference-engine protocol: what a workflow and the weight receiver may ask of any engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pekoe.pipeline.records import Finish, Float32, Int32

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch._C._distributed_c10d import Store

    from pekoe.pipeline.config.vllm_section import VllmConfig


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How one completion is sampled; see `gconfig` for the meaning of each.

    Order: bias, penalty and the ban on stop tokens before `min_new_tokens` change the logits; then temperature, top-k,
    top-p (of what top-k leaves), draw. Whatever was drawn, its recorded log-prob is log_softmax(logits / temperature)
    over the whole vocabulary, as the model gives the logits: the same number that the trainer computes.
    """

    max_new_tokens: int = 512
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    """The model's own end tokens do not end the completion; `stop_token_ids` and `stop` still do."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it is in the completion so far."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""


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
    adapter: str = ""
    """Name of the LoRA adapter that samples; empty: the model itself. `versions` are then the adapter's."""


@dataclass(frozen=True, slots=True)
class Response:
    """A completion: only the sampled tokens, the stop token included."""

    tokens: Int32  # [T]
    logprobs: Float32  # [T] at the sampling temperature, of the full distribution (before top-p / top-k)
    versions: Int32  # [T]
    finish: Finish


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is built from. It can travel to another process."""

    path: str
    """Model folder in Hugging Face format."""
    tokenizer_path: str
    dtype: str
    device: str
    """Kind: `cpu`, `cuda` or `npu`."""
    device_index: int
    """Among the devices that the process sees."""
    max_slots: int
    """Sequences decoded together, at most."""
    context_limit: int
    """Most tokens of prompt plus completion."""
    deterministic: bool = False
    sleeps: bool = False
    """The device is shared with a trainer: `sleep` must give memory back."""
    options: VllmConfig | None = None
    """The section of the configuration that is the engine's own."""


@dataclass(frozen=True, slots=True)
class Instance:
    """The ranks that make one engine together (tensor parallelism). The first leads; the others lend their device."""

    size: int = 1
    rank: int = 0
    """Within the instance."""
    store: Store | None = None
    """Where the ranks of the instance meet; None for one rank."""
    host: str = "127.0.0.1"
    """Address under which the other ranks of the instance reach this one."""


class EngineFailedError(RuntimeError):
    """The engine that computed the request has failed: the same request may be issued again to another one."""


class EngineClosedError(RuntimeError):
    """The engine was closed while the request was under way, or before."""


class InferenceEngine(Protocol):
    """One engine owns one thread (or process) that decodes; all methods are thread-safe.

    Engines are registered by a class with `build(settings, instance, on_failure) -> InferenceEngine`."""

    async def generate(self, request: GenerationRequest) -> Response:
        """Cancelling the task aborts the request and frees its slot. Zero room gives an empty LENGTH response."""
        ...

    def pause(self, *, drain: bool = False) -> None:
        """Returns when decoding has stopped at a token; unfinished sequences are kept. Nested calls are an error.

        With `drain` the sequences under way are finished first; requests that have not begun wait."""
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

    def logprobs(self, sequences: list[Int32], temperature: float = 1.0) -> list[Float32]:
        """Token-aligned log-probs [T] (first is 0) of given sequences. Paused only."""
        ...

    def load_adapter(self, name: str, folder: Path, version: int) -> None:
        """Loads a LoRA adapter in PEFT's format, or replaces the one of that name; requests under way go on with the
        new one. Paused only. ValueError where the engine has none."""
        ...

    def gauges(self) -> dict[str, float]:
        """`running`, `waiting`, `tokens` sampled so far, `version`, … for heartbeats and metrics.

        The watchdog expects `tokens` or `prefilled_tokens` to grow while there are `running` ones and `serving` is
        not 0."""
        ...

    def close(self) -> None: ...
