"""vLLM as an inference engine, in the rank's own process.

```
 generate (any asyncio loop) ──► waiting ─┐                     pause() waits for the step under way
                                          ▼                       │
 engine thread:  take a turn (commands, step or not) ─► apply the commands ─► step ─► futures of the ended ones
                     ▲                                                      │
                     └── load_weights, logprobs, sleep, … are commands too: their callers wait for the answer
```
Only the engine thread touches vLLM. It waits, without using the CPU, for requests that may run, and while it is paused
or may not serve. A sequence is in vLLM's batch only while it has one of `max_slots` places; what it samples and when it
ends is decided by the same code as in the hf engine.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoTokenizer

from pekoe.pipeline.config.vllm_section import VllmConfig
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
from pekoe.pipeline.rollout.engines.request_check import RequestCheck
from pekoe.pipeline.rollout.engines.sequence_state import SequenceState
from pekoe.pipeline.rollout.engines.vllm.adapters import check_adapter
from pekoe.pipeline.rollout.engines.vllm.checkpoint_names import CheckpointNames
from pekoe.pipeline.rollout.engines.vllm.commands import Command, Load, LoadAdapter, Score, Sleep, Stop, Turn, Wake
from pekoe.pipeline.rollout.engines.vllm.lockstep import Lockstep
from pekoe.pipeline.rollout.engines.vllm.process_setup import check_installed
from pekoe.pipeline.rollout.engines.vllm.request_book import RequestBook
from pekoe.pipeline.rollout.engines.vllm.turn_codec import encode_turn
from pekoe.pipeline.rollout.engines.vllm.vllm_core import VllmCore
from pekoe.pipeline.rollout.engines.vllm.vllm_follower import Receive, VllmFollower

if TYPE_CHECKING:
    Weights = Iterable[tuple[str, torch.Tensor]]

GATHER_SECONDS = 0.001
"""An idle engine starts when no request has come for this long: a group's samples come one after the other."""


class Call:
    """A command whose caller waits for its answer."""

    def __init__(self, command: Command, weights: Weights | None = None) -> None:
        self.command = command
        self.weights = weights
        self.answer: Future[Any] = Future()

    @property
    def may_fail(self) -> bool:
        """An exception of the command leaves an engine that can still be used."""
        return isinstance(self.command, Load | LoadAdapter)


class VllmEngine:
    """`InferenceEngine` over vLLM; see the module and `rollout/engine.py`.

    With `deterministic`, every sequence is decoded alone, lowest group and sample first: its tokens and log-probs do
    not depend, to the bit, on what else arrives or when. `on_failure` is called once, from the engine thread, with what
    stopped it (kept in `failure`). Of an instance of several ranks this is the leader: each turn is shared with the
    others first, and a failure on any of them is one of the engine, which cannot be closed in order any more.
    """

    def __init__(
        self, settings: EngineSettings, instance: Instance, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        self.failure: BaseException | None = None
        self.on_failure = on_failure
        self._settings = settings
        self._instance = instance
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_path)
        self._names = CheckpointNames(settings.path, tokenizer)
        positions = self._names.positions
        if settings.context_limit < 2 or (positions is not None and settings.context_limit > positions):
            allowed = f"2 to the model's {positions} positions"
            raise ValueError(f"gconfig.max_tokens: {settings.context_limit}; allowed: {allowed}")
        self._requests = RequestCheck(
            vocabulary=self._names.vocabulary,
            context_limit=settings.context_limit,
            end_ids=self._names.end_ids,
            tokenizer=tokenizer,
        )
        self._condition = threading.Condition()
        self._book = RequestBook(settings.max_slots, settings.deterministic)
        self._calls: deque[Call] = deque()
        self._computing: Call | None = None
        self._pause_wanted = False
        self._draining = False
        self._parked = False
        self._asleep = False
        self._broken = ""
        """Why the weights may not serve; empty when they may."""
        self._closing = False
        self._core: VllmCore | None = None
        self._line: Lockstep | None = None
        """To the other ranks of the instance."""
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(built,), name="vllm-engine", daemon=True)
        self._thread.start()
        built.result()

    @classmethod
    def build(
        cls, settings: EngineSettings, instance: Instance, on_failure: Callable[[BaseException], None] | None = None
    ) -> VllmEngine:
        """As the registry's users ask for it. ValueError where vLLM is not installed."""
        check_installed()
        return cls(settings, instance, on_failure)

    @classmethod
    def follow(
        cls, settings: EngineSettings, instance: Instance, receive: Receive, on_failure: Callable[[BaseException], None]
    ) -> VllmFollower:
        """On the other ranks of an instance, while its first one calls `build`."""
        check_installed()
        return VllmFollower(settings, instance, receive, on_failure)

    @property
    def version(self) -> int:
        return 0 if self._core is None else self._core.version

    async def generate(self, request: GenerationRequest) -> Response:
        """See the protocol. EngineFailedError, EngineClosedError, or ValueError when it cannot be served."""
        stop = self._requests.stop_check(request, self._adapter_names())
        if stop.max_new <= 0:
            return Response(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), Finish.LENGTH)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Response] = loop.create_future()
        sequence = SequenceState(request, stop, lambda outcome: deliver(loop, future, outcome))
        with self._condition:
            self._raise_if_stopped()
            self._book.waiting.append(sequence)
            self._condition.notify_all()
        try:
            return await future
        finally:
            if future.cancelled():
                with self._condition:
                    sequence.cancelled = True
                    self._book.any_cancelled = True
                    self._condition.notify_all()

    def pause(self, *, drain: bool = False) -> None:
        with self._condition:
            self._raise_if_stopped()
            if self._pause_wanted:
                raise RuntimeError("vllm engine: pause() while it is paused")
            self._pause_wanted = True
            self._draining = drain
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._parked or self._closing or self.failure is not None)
            self._raise_if_stopped()

    def load_weights(self, weights: Weights, version: int) -> None:
        self._call("load_weights", Load(version), weights)

    def resume(self) -> None:
        with self._condition:
            self._require_paused("resume")
            if self._asleep:
                raise RuntimeError("vllm engine: resume() while it sleeps; call wake() first")
            self._pause_wanted = False
            self._parked = False
            self._condition.notify_all()

    def sleep(self) -> None:
        self._call("sleep", Sleep())
        self._asleep = True

    def wake(self) -> None:
        """The engine stays paused until `resume`."""
        self._call("wake", Wake())
        self._asleep = False

    def logprobs(self, sequences: list[Int32], temperature: float = 1.0) -> list[Float32]:
        if self._asleep:
            raise RuntimeError("vllm engine: logprobs() while it sleeps; call wake() first")
        for sequence in sequences:
            if len(sequence) > self._settings.context_limit:
                allowed = f"up to gconfig.max_tokens ({self._settings.context_limit})"
                raise ValueError(f"logprobs: a sequence of {len(sequence)} tokens; allowed: {allowed}")
        plain = tuple(tuple(map(int, sequence)) for sequence in sequences)
        result: list[Float32] = self._call("logprobs", Score(plain, temperature))
        return result

    def load_adapter(self, name: str, folder: Path, version: int) -> None:
        check_adapter(name, folder, self._adapter_names(), self._settings.options or VllmConfig())
        self._call("load_adapter", LoadAdapter(name, folder, version))

    def gauges(self) -> dict[str, float]:
        core = self._core
        stopped = self._broken or self._pause_wanted or self._closing or self.failure is not None
        counts = (0, 0, 0, 0) if core is None else (
            core.num_sampled, core.num_prefilled, core.num_steps, core.cache_bytes
        )  # fmt: skip
        return {
            "running": float(sum(not s.cancelled for s in list(self._book.active.values()))),
            "waiting": float(len(self._book.waiting)),
            "tokens": float(counts[0]),
            "prefilled_tokens": float(counts[1]),
            "steps": float(counts[2]),
            "cache_bytes": float(counts[3]),
            "version": float(self.version),
            "serving": float(not stopped),
        }

    def close(self) -> None:
        """Stops at a token; requests under way raise EngineClosedError. May be called again."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _adapter_names(self) -> list[str]:
        return [] if self._core is None else self._core.adapters.names

    def _call(self, verb: str, command: Command, weights: Weights | None = None) -> Any:
        call = Call(command, weights)
        with self._condition:
            self._require_paused(verb)
            self._calls.append(call)
            self._condition.notify_all()
        return call.answer.result()

    def _require_paused(self, verb: str) -> None:
        with self._condition:
            self._raise_if_stopped()
            if not self._parked:
                raise RuntimeError(f"vllm engine: {verb}() needs a paused engine")

    def _raise_if_stopped(self) -> None:
        if self.failure is not None:
            raise _failed(self.failure)
        if self._closing:
            raise EngineClosedError("vllm engine: it is closed")

    def _run(self, built: Future[None]) -> None:
        """The engine thread."""
        try:
            if self._instance.size > 1:
                self._line = Lockstep(self._instance, self._stop_with)
            core = self._core = VllmCore(self._settings, self._instance, self._names)
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(None)
        try:
            while True:
                turn, call = self._take(core)
                if self._line is not None:
                    self._line.share(encode_turn(turn))
                self._compute(core, turn, call)
                if turn.commands == (Stop(),):
                    break
        except BaseException as error:
            self._stop_with(error)
        else:
            self._give_up(lambda: EngineClosedError("vllm engine: it was closed"))
        finally:
            self._end(core)

    def _end(self, core: VllmCore) -> None:
        """Gives back what it holds; with other ranks, after a failure, that would wait for those that are gone."""
        if self._line is None:
            core.close()
        elif self.failure is None:
            core.close()
            self._line.close()
        if self.failure is not None:
            traceback.clear_frames(self.failure.__traceback__)  # they hold the weights while somebody has the error
        gc.collect()

    def _take(self, core: VllmCore) -> tuple[Turn, Call | None]:
        """Waits for something to do: commands, and whether a step follows; with the caller that waits, if any."""
        with self._condition:
            while not self._closing:
                if self._calls:
                    call = self._computing = self._calls.popleft()
                    return Turn((call.command,), step=False), call
                if self._pause_wanted and (self._broken or not (self._draining and self._book.active)):
                    if not self._parked:
                        self._parked = True
                        self._condition.notify_all()
                elif not self._broken and self._book.has_work(core.version):
                    if self._book.gathers and self._wait_for_more():
                        continue
                    commands = self._book.changes(core.version, admit=not self._pause_wanted)
                    return Turn(tuple(commands), step=bool(self._book.active)), None
                self._condition.wait()
        return Turn((Stop(),), step=False), None

    def _wait_for_more(self) -> bool:
        """False when nothing has happened for a moment."""
        return self._condition.wait(GATHER_SECONDS) or self._pause_wanted or self._closing

    def _compute(self, core: VllmCore, turn: Turn, call: Call | None) -> None:
        if call is not None:
            self._answer(core, call)
            return
        for command in turn.commands:
            core.apply(command)
        if turn.step:
            sampled = core.step()
            if self._line is not None:
                self._line.digest.add(sampled)
            with self._condition:
                ended = self._book.book(sampled, core.version_of)
            for sequence, response in ended:
                sequence.deliver(response)

    def _answer(self, core: VllmCore, call: Call) -> None:
        """Does what a caller waits for. A load that fails leaves an engine that serves nothing until one succeeds."""
        if isinstance(call.command, Load):
            self._broken = f"the load of version {call.command.version} did not finish"
        try:
            answer = core.apply(call.command, call.weights)
        except BaseException as error:
            self._settle(call, error)
            if not call.may_fail or core.is_lost or self._line is not None:
                raise
        else:
            if isinstance(call.command, Load):
                self._broken = ""
            self._settle(call, answer)

    def _settle(self, call: Call, outcome: Any) -> None:
        """Answers once: the engine may have failed in the meantime."""
        with self._condition:
            self._computing = None
            if call.answer.done():
                return
            if isinstance(outcome, BaseException):
                call.answer.set_exception(outcome)
            else:
                call.answer.set_result(outcome)

    def _stop_with(self, error: BaseException) -> None:
        with self._condition:
            if self.failure is not None:
                return
            self.failure = error
            self._condition.notify_all()
        try:
            if self.on_failure is not None:
                self.on_failure(error)
        finally:
            self._give_up(lambda: _failed(error))

    def _give_up(self, make_error: Callable[[], BaseException]) -> None:
        """Fails all who still wait; later ones are refused before they enter the book."""
        with self._condition:
            calls = [*self._calls, *([self._computing] if self._computing is not None else [])]
            self._calls.clear()
            self._book.give_up(make_error)
        for call in calls:
            self._settle(call, make_error())


def _failed(error: BaseException) -> EngineFailedError:
    failure = EngineFailedError(f"vllm engine failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
