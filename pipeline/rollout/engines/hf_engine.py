"""The default inference engine: token-level continuous batching of any transformers causal LM, in a thread of its own.

```
 generate (any asyncio loop) ──► inbox ─┐                     pause() waits for the token being computed
                                        ▼                       │
 engine thread:  [parked? wait] ─► sweep, admit ─► prefill … ─► decode one token per row ─► futures of the ended ones
                     ▲                                                      │
                     └── load_weights, logprobs, sleep run in the caller's thread while the engine thread is parked
```
The engine thread waits, without using the CPU, for requests that may run, and while it is paused or may not serve.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoTokenizer

from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.records import Finish, Float32, Int32
from pekoe.pipeline.rollout.engine import (
    EngineClosedError,
    EngineFailedError,
    EngineSettings,
    GenerationRequest,
    Instance,
    Response,
)
from pekoe.pipeline.rollout.engines.answer import deliver
from pekoe.pipeline.rollout.engines.batch_decoder import BatchDecoder
from pekoe.pipeline.rollout.engines.request_check import RequestCheck
from pekoe.pipeline.rollout.engines.sequence_state import SequenceState
from pekoe.pipeline.rollout.engines.served_model import ServedModel
from pekoe.pipeline.rollout.engines.stop_check import StopCheck, end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFILL_TOKENS_CPU = 512
PREFILL_TOKENS_ACCELERATOR = 8192
"""Tokens of one prefill pass: what a pause may have to wait for."""


GATHER_SECONDS = 0.001
"""An idle engine starts when no request has come for this long: a group's samples come one after the other."""


class HfEngine:
    """`InferenceEngine` over transformers; see the module and `rollout/engine.py`.

    `model` serves an already built model (`path` is not read); the engine takes it over: its attention is replaced.
    With `deterministic`, every group is decoded as its own fixed-shape batch: its tokens and log-probs do not depend,
    to the bit, on what else arrives or when. `on_failure` is called once, from the engine thread, with what stopped it
    (kept in `failure`).
    """

    def __init__(
        self, path: str, *, tokenizer: PreTrainedTokenizerBase | None, dtype: str, device: torch.device, max_slots: int,
        context_limit: int, deterministic: bool, model: PreTrainedModel | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:  # fmt: skip
        if max_slots < 1:
            raise ValueError(f"rollout.max_slots: {max_slots}; allowed: 1 or more")
        self.failure: BaseException | None = None
        self.on_failure = on_failure
        self.version = 0
        self._model = ServedModel(path, dtype, device, model)
        positions = self._model.num_positions
        if context_limit < 2 or (positions is not None and context_limit > positions):
            raise ValueError(f"gconfig.max_tokens: {context_limit}; allowed: 2 to the model's {positions} positions")
        self._max_slots = max_slots
        self._deterministic = deterministic
        self._requests = RequestCheck(
            vocabulary=self._model.vocabulary,
            context_limit=context_limit,
            end_ids=end_token_ids(self._model.model, tokenizer),
            tokenizer=tokenizer,
        )
        self._decoder = BatchDecoder(
            self._model,
            max_slots=max_slots,
            context_limit=context_limit,
            deterministic=deterministic,
            prefill_tokens=PREFILL_TOKENS_CPU if device.type == "cpu" else PREFILL_TOKENS_ACCELERATOR,
        )
        self._condition = threading.Condition()
        self._inbox: list[SequenceState] = []
        self._pause_wanted = False
        self._draining = False
        """A pause is wanted once the sequences in the rows have ended."""
        self._parked = False
        self._asleep = False
        self._broken = ""
        """Why the weights may not serve; empty when they may."""
        self._closing = False
        self._any_cancelled = False
        self._thread = threading.Thread(target=self._run, name="hf-engine", daemon=True)
        self._thread.start()

    @classmethod
    def build(
        cls, settings: EngineSettings, instance: Instance, on_failure: Callable[[BaseException], None] | None = None
    ) -> HfEngine:
        """As the registry's users ask for it. ValueError for an instance of several ranks."""
        if instance.size > 1:
            raise ValueError(f"rollout.backend: an hf engine of {instance.size} ranks; allowed: dimension d alone")
        return cls(
            settings.path,
            tokenizer=AutoTokenizer.from_pretrained(settings.tokenizer_path),
            dtype=settings.dtype,
            device=choose(settings.device).torch_device(settings.device_index),
            max_slots=settings.max_slots,
            context_limit=settings.context_limit,
            deterministic=settings.deterministic,
            on_failure=on_failure,
        )

    async def generate(self, request: GenerationRequest) -> Response:
        """See the protocol. EngineFailedError when the engine failed, EngineClosedError when it was closed, ValueError
        when the request cannot be served."""
        stop = self._check(request)
        if stop.max_new <= 0:
            return Response(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), Finish.LENGTH)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Response] = loop.create_future()
        sequence = SequenceState(request, stop, lambda outcome: deliver(loop, future, outcome))
        with self._condition:
            self._raise_if_stopped()
            self._inbox.append(sequence)
            self._condition.notify_all()
        try:
            return await future
        finally:
            if future.cancelled():
                self._cancel(sequence)

    def pause(self, *, drain: bool = False) -> None:
        with self._condition:
            self._raise_if_stopped()
            if self._pause_wanted:
                raise RuntimeError("hf engine: pause() while it is paused")
            self._pause_wanted, self._draining = True, drain
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._parked or self._closing or self.failure is not None)
            self._raise_if_stopped()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._require_paused("load_weights")
        self._broken = f"the load of version {version} did not finish"
        self._decoder.invalidate()
        with torch.no_grad():
            self._model.load_weights(weights)
        self.version = version
        self._broken = ""

    def resume(self) -> None:
        self._require_paused("resume")
        if self._asleep:
            raise RuntimeError("hf engine: resume() while it sleeps; call wake() first")
        with self._condition:
            self._pause_wanted = False
            self._parked = False
            self._condition.notify_all()

    def sleep(self) -> None:
        self._require_paused("sleep")
        self._decoder.invalidate()
        self._asleep = True
        if self._model.device.type != "cpu":
            torch.get_device_module(self._model.device).empty_cache()

    def wake(self) -> None:
        """The cache is allocated again as sequences need it; the engine stays paused until `resume`."""
        self._require_paused("wake")
        self._asleep = False

    def logprobs(self, sequences: list[Int32], temperature: float = 1.0) -> list[Float32]:
        self._require_paused("logprobs")
        return self._model.logprobs(sequences, temperature)

    def load_adapter(self, name: str, folder: Path, version: int) -> None:
        raise ValueError(f"adapter {name!r}: the hf engine has no LoRA adapters; take rollout.backend: vllm:…")

    def gauges(self) -> dict[str, float]:
        decoder = self._decoder
        return {
            "running": float(sum(s is not None and not s.cancelled for s in list(decoder.rows))),
            "waiting": float(len(decoder.waiting) + len(self._inbox)),
            "tokens": float(decoder.num_sampled),
            "prefilled_tokens": float(decoder.num_prefilled),
            "steps": float(decoder.num_steps),
            "cache_bytes": float(decoder.cache.num_bytes),
            "version": float(self.version),
            "serving": float(not (self._broken or self._pause_wanted or self._closing or self.failure is not None)),
        }

    def close(self) -> None:
        """Stops at a token; requests under way raise EngineClosedError. May be called again."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _check(self, request: GenerationRequest) -> StopCheck:
        """How the request ends; ValueError when it cannot be served."""
        if self._deterministic and not 1 <= request.group_size <= self._max_slots:
            allowed = f"1 to rollout.max_slots ({self._max_slots})"
            raise ValueError(f"gconfig.n_samples: a deterministic group of {request.group_size}; allowed: {allowed}")
        return self._requests.stop_check(request)

    def _cancel(self, sequence: SequenceState) -> None:
        with self._condition:
            sequence.cancelled = True
            self._any_cancelled = True
            self._condition.notify_all()

    def _require_paused(self, verb: str) -> None:
        with self._condition:
            self._raise_if_stopped()
            if not self._parked:
                raise RuntimeError(f"hf engine: {verb}() needs a paused engine")

    def _raise_if_stopped(self) -> None:
        if self.failure is not None:
            raise _failed(self.failure)
        if self._closing:
            raise EngineClosedError("hf engine: it is closed")

    def _run(self) -> None:
        """The engine thread."""
        try:
            while self._wait_for_work():
                self._turn()
        except BaseException as error:
            self._stop_with(error)
        else:
            self._give_up(lambda: EngineClosedError("hf engine: it was closed"))

    def _wait_for_work(self) -> bool:
        """True when there is something to compute, False when the engine closes."""
        with self._condition:
            idle = not self._decoder.active
            while not self._closing:
                self._decoder.waiting.extend(self._inbox)
                self._inbox.clear()
                if self._pause_wanted:
                    if self._has_to_drain():
                        return True
                    if not self._parked:
                        self._parked, self._draining = True, False
                        self._condition.notify_all()
                elif not self._broken:
                    self._sweep()
                    if self._decoder.has_work(self.version):
                        gathering = idle and len(self._decoder.waiting) < self._max_slots
                        if not gathering or not self._condition.wait(GATHER_SECONDS):
                            return True
                        continue
                self._condition.wait()
        return False

    def _has_to_drain(self) -> bool:
        """Whether sequences under way are to be finished before the engine stops."""
        if not self._draining or self._broken:
            return False
        self._sweep()
        return any(self._decoder.rows)

    def _sweep(self) -> None:
        if self._any_cancelled:
            self._any_cancelled = False
            self._decoder.sweep()

    def _turn(self) -> None:
        """Brings waiting sequences in, then computes one pass: prefill while there is any, else a token per row."""
        decoder = self._decoder
        decoder.admit(self.version, begin=not self._draining)
        if decoder.prefill():
            return
        for sequence in decoder.decode(self.version):
            sequence.deliver(sequence.response())

    def _stop_with(self, error: BaseException) -> None:
        with self._condition:
            self.failure = error
            self._condition.notify_all()
        try:
            if self.on_failure is not None:
                self.on_failure(error)
        finally:
            self._give_up(lambda: _failed(error))

    def _give_up(self, make_error: Callable[[], BaseException]) -> None:
        """Fails every request that has no answer yet; later ones are refused before they enter the inbox."""
        with self._condition:
            orphans = [*self._decoder.active, *self._decoder.waiting, *self._inbox]
            self._inbox.clear()
        for sequence in orphans:
            sequence.deliver(make_error())


def _failed(error: BaseException) -> EngineFailedError:
    failure = EngineFailedError(f"hf engine failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
