"""`ChildEngine`: any registered engine in a child process, as a rank uses it.

    caller's threads ──► outbox ─► writer thread ──► host process       a call waits for its answer, at most its limit
                 ▲                                        │
                 └── answers, gauges ◄── reader thread ◄──┘             the reader waits for frames, a death, a stall

The process' death and a stall both end in the same way: the process and all it started are killed, `on_failure` hears
of it once, and every request under way raises EngineFailedError. Nothing here waits for the process on the main thread:
`gauges` gives what was reported last.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pekoe.pipeline import framed_stream
from pekoe.pipeline.records import Float32, Int32
from pekoe.pipeline.rollout.child.bucket_writer import BucketWriter
from pekoe.pipeline.rollout.child.buckets import NUM_BUCKETS, Bucket, DeviceBucket, HostBucket
from pekoe.pipeline.rollout.child.call_table import CallTable
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.child.protocol import (
    Answer,
    Build,
    Cancel,
    Close,
    Failed,
    Gauges,
    Generate,
    Taken,
    ToHost,
    Verb,
    decode,
    encode,
)  # fmt: skip
from pekoe.pipeline.rollout.child.silence_watch import ChildLimits, SilenceWatch
from pekoe.pipeline.rollout.engine import (
    EngineClosedError,
    EngineFailedError,
    EngineSettings,
    GenerationRequest,
    Response,
)

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 64 << 20
GAUGE_SECONDS = 0.5
LOOK_SECONDS = 0.25
LATE_SECONDS = 0.5
"""A look that comes so much later than it should: this process did not run meanwhile."""
SLICE_SECONDS = 1.0
"""Longest wait for an answer at once; a slice that took longer because this process was suspended counts as one."""
DEATH_SECONDS = 1.0
"""From the end of the stream to the nursery's word how the process ended."""

logger = logging.getLogger(__name__)


class ChildEngine:
    """`InferenceEngine` in a process that `nursery` starts; returns when the engine there can serve.

    ValueError when the engine refuses its settings, EngineFailedError when its process does not live to serve (then
    `on_failure` is not called). Later, `on_failure` is called once, on the thread that saw the failure, before the
    requests under way raise; it must not wait for them.
    """

    def __init__(
        self, nursery: EngineNursery, engine: str, settings: EngineSettings, *, limits: ChildLimits | None = None,
        on_failure: Callable[[BaseException], None] | None = None, bucket_bytes: int = BUCKET_BYTES,
    ) -> None:  # fmt: skip
        self.failure: EngineFailedError | None = None
        self._engine = engine
        self._nursery = nursery
        self._limits = limits or ChildLimits()
        self._on_failure = on_failure
        self._is_built = False
        self._bucket_bytes = bucket_bytes
        self._buckets = _make_buckets(settings, bucket_bytes)
        self._calls = CallTable()
        self._watch = SilenceWatch(self._limits)
        self._gauges = {"running": 0.0, "waiting": 0.0, "tokens": 0.0, "version": 0.0, "serving": 0.0}
        self._outgoing: BucketWriter | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        descriptors = [bucket.shared.descriptor for bucket in self._buckets if isinstance(bucket, HostBucket)]
        try:
            self._process = nursery.spawn(descriptors)
        except EngineFailedError:
            self._close_buckets()
            raise
        self._process.channel.settimeout(self._limits.silence)
        self._threads = [
            threading.Thread(target=self._read, name="engine-answers", daemon=True),
            threading.Thread(target=self._write, name="engine-calls", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._build(settings)

    @property
    def pid(self) -> int:
        """Of the process that serves."""
        return self._process.pid

    async def generate(self, request: GenerationRequest) -> Response:
        number, future = self._calls.open()
        self._post(Generate(number, request))
        try:
            response: Response = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._calls.forget(number):
                self._post(Cancel(number))
            raise
        return response

    def pause(self, *, drain: bool = False) -> None:
        self._verb("pause", limit=self._limits.drain if drain else self._limits.answer, drain=drain)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """As the engine's own; a failure there ends the iteration at once, at the tensor that is being fetched."""
        number, future = self._calls.open()
        stream = BucketWriter(
            number, self._buckets, self._bucket_bytes, self._post, lambda: _raise_if_done(future), self._limits.bucket,
            self._stall,
        )  # fmt: skip
        self._outgoing = stream
        self._post(Verb(number, "load_weights", (version,)))
        try:
            for name, tensor in weights:
                stream.put(name, tensor)
            stream.end()
            self._await(future, "load_weights", self._limits.bucket)
        except BaseException as error:
            _close(weights)
            if not future.done():
                stream.break_off(f"{type(error).__name__}: {error}")
                with suppress(Exception):
                    self._await(future, "load_weights", self._limits.bucket)
            raise
        finally:
            self._outgoing = None
            for bucket in self._buckets:
                bucket.rest()

    def resume(self) -> None:
        self._verb("resume", limit=self._limits.answer)

    def sleep(self) -> None:
        self._verb("sleep", limit=self._limits.answer)

    def wake(self) -> None:
        self._verb("wake", limit=self._limits.answer)

    def logprobs(self, sequences: list[Int32], temperature: float = 1.0) -> list[Float32]:
        found: list[Float32] = self._verb("logprobs", sequences, temperature, limit=self._limits.answer)
        return found

    def load_adapter(self, name: str, folder: Path, version: int) -> None:
        self._verb("load_adapter", name, folder, version, limit=self._limits.answer)

    def gauges(self) -> dict[str, float]:
        """The engine's, as it reported them last (at most half a second ago, or with an answer), and `resident_bytes`
        of its process. Never waits."""
        over = {"serving": 0.0, "running": 0.0} if self._calls.is_over else {}
        return {**self._gauges, **over}

    def close(self) -> None:
        """Requests under way raise EngineClosedError. Returns when the process is gone. May be called again."""
        if self._calls.refuse(lambda: EngineClosedError(f"{self._engine} engine: it is closed")):
            self._calls.fail_waiting()
            self._post(Close(-1))
            if not self._process.ended.wait(self._limits.close):
                self._nursery.kill(self._process)
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._limits.close)
        self._close_buckets()

    def _build(self, settings: EngineSettings) -> None:
        number, future = self._calls.open()
        assert number == 0, "the answer to Build has number 0"
        level = logging.getLogger().getEffectiveLevel()
        self._post(Build(self._engine, settings, tuple(sys.path), level, GAUGE_SECONDS))
        try:
            self._await(future, "the start", self._limits.start)
        except BaseException:
            self.close()
            raise
        self._is_built = True

    def _verb(self, name: str, *arguments: Any, limit: float, **options: Any) -> Any:
        number, future = self._calls.open()
        self._post(Verb(number, name, arguments, tuple(options.items())))
        return self._await(future, name, limit)

    def _await(self, future: Future[Any], what: str, limit: float) -> Any:
        """The answer to a call. EngineFailedError when there is none in time: the process is killed."""
        waited = 0.0
        while waited < limit:
            seconds = min(SLICE_SECONDS, limit - waited)
            if concurrent.futures.wait([future], seconds).done:
                return future.result()
            waited += seconds
        raise self._stall(f"gave no answer to {what} within {limit:g} s")

    def _stall(self, how: str) -> Exception:
        """Ends a process that does not answer; the error to raise."""
        self._fail(how, is_stuck=True)
        return self._failed()

    def _post(self, message: ToHost) -> None:
        self._outbox.put(encode(message))

    def _write(self) -> None:
        """The writer thread. What cannot be sent any more is dropped: the reader sees why."""
        while (data := self._outbox.get()) is not None:
            with suppress(OSError):
                self._process.channel.sendall(data)

    def _read(self) -> None:
        """The reader thread: until the process is gone."""
        channel = self._process.channel
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        while True:
            began = time.monotonic()
            has_word = poller.poll(LOOK_SECONDS * 1000)
            if (late := time.monotonic() - began - LOOK_SECONDS) > LATE_SECONDS:
                self._watch.stood_still(late)
            if has_word:
                try:
                    body = framed_stream.receive(channel)
                except TimeoutError:
                    body = b""
                if body is None:
                    break
                if body:
                    self._take(decode(body))
                    continue
            elif self._process.ended.is_set():
                break
            if stuck := self._watch.judge():
                self._fail(stuck, is_stuck=True)
                break
        self._process.ended.wait(DEATH_SECONDS)
        self._fail(self._process.how or "closed its stream")
        channel.close()

    def _take(self, message: Answer | Taken | Gauges | Failed) -> None:
        if isinstance(message, Taken):
            self._watch.heard()
            if self._outgoing is not None and self._outgoing.load == message.load:
                self._outgoing.taken.put(message)
        elif isinstance(message, Failed):
            self._fail(f"reports that its engine failed: {message.error.kind}: {message.error.text}", message)
        else:
            gauges = message.gauges if isinstance(message, Answer) else message.values
            self._watch.heard(gauges)
            if gauges:
                self._gauges = {**self._gauges, **gauges}
            if isinstance(message, Answer):
                self._calls.answer(message)

    def _fail(self, how: str, failed: Failed | None = None, *, is_stuck: bool = False) -> None:
        """The first call ends the process and tells everybody; later ones, and those after `close`, do nothing."""
        text = f"{self._engine} engine: its process (pid {self._process.pid}) {how}"
        failure = EngineFailedError(text)
        if failed is not None:
            failure.add_note(f"in the engine's process:\n{failed.error.trace}")
        if not self._calls.refuse(lambda: _again(failure)):
            return
        self.failure = failure
        logger.error("%s", text)
        self._nursery.kill(self._process, stacks=is_stuck)
        try:
            if self._is_built and self._on_failure is not None:
                self._on_failure(failure)
        finally:
            self._calls.fail_waiting()
            self._outbox.put(None)

    def _failed(self) -> Exception:
        if self.failure is None:
            return EngineClosedError(f"{self._engine} engine: it is closed")
        return _again(self.failure)

    def _close_buckets(self) -> None:
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            bucket.close()


def _make_buckets(settings: EngineSettings, bucket_bytes: int) -> list[Bucket]:
    if settings.device == "cpu":
        return [HostBucket(bucket_bytes) for _ in range(NUM_BUCKETS)]
    from pekoe.pipeline.devices.device import choose

    device = choose(settings.device).torch_device(settings.device_index)
    return [DeviceBucket(bucket_bytes, device) for _ in range(NUM_BUCKETS)]


def _again(failure: EngineFailedError) -> EngineFailedError:
    """One of its own for each who raises it."""
    error = EngineFailedError(str(failure))
    error.__cause__ = failure
    return error


def _raise_if_done(future: Future[Any]) -> None:
    """During a load: whatever the engine has answered already, it has not taken all tensors."""
    if future.done():
        future.result()
        raise RuntimeError("the engine ended its load before the weights did")


def _close(weights: object) -> None:
    """A generator's sender hears at once that nobody reads on."""
    close = getattr(weights, "close", None)
    if close is not None:
        close()
