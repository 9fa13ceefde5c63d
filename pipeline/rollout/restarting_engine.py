"""An inference engine that outlives its failures: what fails is closed and built anew, its requests are issued again.

```
 generate ─► engine 0 ──fails──► requests wait ─────────────────────► the same requests, same seeds ─► engine 1
                │                                                                                         ▲
                └─► tell EngineFailed ─► builder thread: close, build, pause ─► tell EngineRestored ─► full load
```
Who waits: requests for the next engine, the builder for the device (while the engine is meant to sleep), the engine
that was built anew for a full load of weights. Whoever pauses, loads and resumes need not know which engine it is:
after a failure `pause`, `sleep`, `wake` and `resume` only say how the next one is to be.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pekoe.pipeline.messages import EngineFailed, EngineRestored
from pekoe.pipeline.records import Float32, Int32
from pekoe.pipeline.rollout.engine import (
    EngineClosedError,
    EngineFailedError,
    GenerationRequest,
    InferenceEngine,
    Response,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

REASON_CHARACTERS = 2000
COUNTERS = ("tokens", "prefilled_tokens")
"""Gauges that only grow, over all engines."""
GONE_SECONDS, LOOK_SECONDS = 5.0, 0.02
"""For whoever has a failed engine to drop it; one that is kept longer does not hold up the next one."""

MakeEngine = Callable[[Callable[[BaseException], None]], InferenceEngine]
"""Builds an engine that calls what it is given, once, when it fails."""


class RestartingEngine:
    """`InferenceEngine` over engines that may fail; see the module.

    The first engine is built at once, and serves at once. `tell` hears of a failure and of a restoration, from any
    thread. The failure after `max_restarts` rebuilt engines, over the whole life of this object, goes to `fatal`: an
    engine that fails now and then for days is broken, too.
    """

    def __init__(
        self, make: MakeEngine, *, max_restarts: int, tell: Callable[[EngineFailed | EngineRestored], None],
        fatal: Callable[[BaseException], None], limit: str = "",
    ) -> None:  # fmt: skip
        """`limit`: why there is no other engine, for the message to `fatal`; empty: the configured number."""
        self._limit = limit or f"rollout.max_engine_restarts is {max_restarts}"
        self._make, self._max_restarts, self._tell, self._fatal = make, max_restarts, tell, fatal
        self._condition = threading.Condition()
        self._generation = 0
        self._restarts = 0
        self._is_paused = False
        """As the caller wants it; the engine itself is also paused from its rebuilding to the end of a full load."""
        self._is_asleep = False
        self._needs_load = False
        self._is_closed = False
        self._adapters: dict[str, tuple[Path, int]] = {}
        self._adapters_are_in = 0
        """Generation that has all of them."""
        self._counted = dict.fromkeys(COUNTERS, 0.0)
        """Of engines that have failed."""
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._engine: InferenceEngine | None = None
        engine = make(lambda error: self._fail(0, error))
        with self._condition:
            has_failed = self._generation > 0
            if not has_failed:
                self._engine = engine
        if has_failed:
            engine.close()

    async def generate(self, request: GenerationRequest) -> Response:
        """See the protocol. Waits while the engine is built anew. EngineClosedError once this object is closed."""
        while True:
            generation, engine = await self._next_engine()
            try:
                return await engine.generate(request)
            except EngineFailedError as error:
                self._fail(generation, error)
            except EngineClosedError:
                with self._condition:
                    if self._is_closed or generation == self._generation:
                        raise
            del engine  # who waits for the next one must not keep the weights of this one

    async def generate_once(self, request: GenerationRequest) -> Response:
        """Of the engine that serves now, or EngineFailedError: for who would rather not wait for the next one."""
        with self._condition:
            self._raise_if_closed()
            generation, engine = self._generation, self._engine
            if engine is None or self._needs_load:
                raise EngineFailedError("engine: it is built anew, or waits for its weights")
        try:
            return await engine.generate(request)
        except EngineFailedError as error:
            self._fail(generation, error)
            raise

    def pause(self, *, drain: bool = False) -> None:
        """See the protocol; an engine that fails meanwhile has stopped, too."""
        with self._condition:
            self._raise_if_closed()
            if self._is_paused:
                raise RuntimeError("engine: pause() while it is paused")
            generation, engine, is_held = self._generation, self._engine, self._needs_load
        if engine is not None and not is_held:
            self._ask(generation, lambda: engine.pause(drain=drain))
        with self._condition:
            self._is_paused = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See the protocol. What `weights` raises is no failure of the engine and is raised as it is; anything else is
        one: EngineFailedError."""
        generation, engine = self._paused_engine("load_weights")
        source = WatchedWeights(weights)
        with self._condition:
            self._needs_load = True
        try:
            engine.load_weights(source, version)
            if self._adapters_are_in != generation:
                for name, (folder, adapter_version) in self._adapters.items():
                    engine.load_adapter(name, folder, adapter_version)
                self._adapters_are_in = generation
        except Exception as error:
            if source.has_failed and not isinstance(error, EngineFailedError):
                raise
            self._fail(generation, error)
            raise _failed(error) from error
        with self._condition:
            if generation == self._generation:
                self._needs_load = False
                return
        raise EngineFailedError(f"the engine failed while version {version} was loaded")

    def resume(self) -> None:
        """See the protocol; one that was built anew goes on after its first full load only."""
        with self._condition:
            self._raise_if_closed()
            if not self._is_paused:
                raise RuntimeError("engine: resume() needs a paused engine")
            if self._is_asleep:
                raise RuntimeError("engine: resume() while it sleeps; call wake() first")
            self._is_paused = False
            generation, engine, is_held = self._generation, self._engine, self._needs_load
        if engine is not None and not is_held:
            self._ask(generation, engine.resume)

    def sleep(self) -> None:
        """See the protocol. Nothing is built on the device until `wake`."""
        with self._condition:
            self._raise_if_closed()
            if not self._is_paused:
                raise RuntimeError("engine: sleep() needs a paused engine")
            self._is_asleep = True
            generation, engine = self._generation, self._engine
        if engine is not None:
            self._ask(generation, engine.sleep)

    def wake(self) -> None:
        with self._condition:
            self._raise_if_closed()
            self._is_asleep = False
            generation, engine = self._generation, self._engine
            self._condition.notify_all()
        if engine is not None:
            self._ask(generation, engine.wake)

    def logprobs(self, sequences: list[Int32], temperature: float = 1.0) -> list[Float32]:
        """See the protocol. EngineFailedError when the engine fails in it, or is being built anew."""
        generation, engine = self._paused_engine("logprobs")
        try:
            return engine.logprobs(sequences, temperature)
        except Exception as error:
            self._fail(generation, error)
            raise _failed(error) from error

    def load_adapter(self, name: str, folder: Path, version: int) -> None:
        """See the protocol; an engine that was built anew gets it again after its full load."""
        _, engine = self._paused_engine("load_adapter")
        engine.load_adapter(name, folder, version)
        self._adapters[name] = (folder, version)

    def gauges(self) -> dict[str, float]:
        """Of the engine; also `restarts` so far, and `down` while there is none."""
        with self._condition:
            engine, counted, restarts, waiting = self._engine, dict(self._counted), self._restarts, len(self._waiters)
        found = {"running": 0.0, "waiting": 0.0, "serving": 0.0} if engine is None else engine.gauges()
        for name, count in counted.items():
            if count or name in found or engine is None:
                found[name] = found.get(name, 0.0) + count
        found["waiting"] = found.get("waiting", 0.0) + waiting
        return {**found, "restarts": float(restarts), "down": float(engine is None)}

    def close(self) -> None:
        """Requests raise EngineClosedError. An engine that is being built is closed as soon as it stands."""
        with self._condition:
            self._is_closed = True
            self._generation += 1
            engine, self._engine = self._engine, None
            self._wake_waiters()
            self._condition.notify_all()
        if engine is not None:
            engine.close()

    async def _next_engine(self) -> tuple[int, InferenceEngine]:
        """The engine, as soon as there is one."""
        while True:
            with self._condition:
                self._raise_if_closed()
                if self._engine is not None:
                    return self._generation, self._engine
                loop = asyncio.get_running_loop()
                waiter = (loop, loop.create_future())
                self._waiters.append(waiter)
            try:
                await waiter[1]
            finally:
                with self._condition:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_set, future)
            except RuntimeError:
                if not loop.is_closed():
                    raise

    def _paused_engine(self, verb: str) -> tuple[int, InferenceEngine]:
        with self._condition:
            self._raise_if_closed()
            if not self._is_paused:
                raise RuntimeError(f"engine: {verb}() needs a paused engine")
            if self._engine is None:
                raise EngineFailedError(f"engine: {verb}() while it is being built anew")
            return self._generation, self._engine

    def _ask(self, generation: int, verb: Callable[[], None]) -> None:
        """What the engine cannot do any more is its failure; the caller goes on with the next one."""
        try:
            verb()
        except Exception as error:
            self._fail(generation, error)

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise EngineClosedError("engine: it is closed")

    def _fail(self, generation: int, error: BaseException) -> None:
        """The engine of this generation does not serve any more; harmless when that is known already."""
        with self._condition:
            if generation != self._generation or self._is_closed:
                return
            failed, self._engine = self._engine, None
            self._generation += 1
            self._needs_load = True
            self._restarts += 1
            restarts, following = self._restarts, self._generation
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]
        if restarts > self._max_restarts:
            times = "once" if restarts == 1 else f"{restarts} times"
            text = f"the engine has failed {times} ({self._limit})"
            final = EngineFailedError(f"{text}: {reason}")
            final.__cause__ = error
            self._fatal(final)
            return
        logger.error("the engine has failed and is built anew (%d of %d): %s", restarts, self._max_restarts, reason)
        self._tell(EngineFailed(reason, restarts))
        threading.Thread(
            target=self._rebuild, args=(following, [failed]), name=f"engine-builder-{restarts}", daemon=True
        ).start()

    def _rebuild(self, generation: int, failed: list[InferenceEngine | None]) -> None:
        """The builder thread, of one engine. `failed` is emptied: the weights in it must be gone before others come."""
        if (engine := failed.pop()) is not None:
            self._close_failed(engine)
            gone = weakref.ref(engine)
            del engine
            _collect(gone)
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or not self._is_asleep)
            if self._is_closed:
                return
        try:
            built = self._make(lambda error: self._fail(generation, error))
            built.pause()
        except Exception as error:
            self._fail(generation, error)
            return
        if not self._install(generation, built):
            built.close()
            return
        logger.warning("the engine stands again; it serves once it has the current weights")
        self._tell(EngineRestored())

    def _install(self, generation: int, engine: InferenceEngine) -> bool:
        """The engine takes over, asleep if it is to be; False when it has failed already, or all is closed."""
        sleeps = False
        while True:
            with self._condition:
                if generation != self._generation:
                    return False
                if sleeps == self._is_asleep:
                    self._engine = engine
                    self._wake_waiters()
                    return True
                sleeps = self._is_asleep
            self._ask(generation, engine.sleep if sleeps else engine.wake)

    def _close_failed(self, failed: InferenceEngine) -> None:
        """Closed even if it does not say what it has counted: the next one needs its place."""
        try:
            found = failed.gauges()
            with self._condition:
                for name in COUNTERS:
                    self._counted[name] += found.get(name, 0.0)
        except Exception:
            logger.exception("the engine that has failed does not say what it has done")
        try:
            failed.close()
        except Exception:
            logger.exception("the engine that has failed could not be closed")


class WatchedWeights:
    """Passes tensors on, and knows whether it was their source that failed."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = iter(weights)
        self.has_failed = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            return next(self._weights)
        except StopIteration:
            raise
        except BaseException:
            self.has_failed = True
            raise


def _collect(engine: weakref.ref[InferenceEngine]) -> None:
    """Returns when an engine that nobody needs is gone; requests that have just failed drop it within moments."""
    deadline = time.monotonic() + GONE_SECONDS
    gc.collect()
    while engine() is not None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        gc.collect()


def _failed(error: BaseException) -> EngineFailedError:
    return EngineFailedError(f"the engine has failed: {type(error).__name__}: {error}"[:REASON_CHARACTERS])


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
