"""Serves one engine to a rank.

    loop (main thread)   reads frames; completions are tasks here; reports gauges
    verbs thread         builds the engine, then its methods one after the other: pause, load_weights, resume, …

The loop waits for frames and for completions, the verbs thread for the engine and, in a load, for chunks of weights.
Nobody waits for the rank's death: the loop sees the end of the stream.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pekoe.pipeline import framed_stream
from pekoe.pipeline.process_tree import kill_descendants
from pekoe.pipeline.registry import INFERENCE_ENGINES, resolve
from pekoe.pipeline.rollout.child.bucket_reader import BucketReader
from pekoe.pipeline.rollout.child.buckets import NUM_BUCKETS, ReceivedBucket
from pekoe.pipeline.rollout.child.protocol import (
    Answer,
    Build,
    Cancel,
    Chunk,
    Close,
    Failed,
    Gauges,
    Generate,
    LoadEnd,
    RemoteError,
    Taken,
    ToRank,
    Verb,
    decode,
    encode,
)  # fmt: skip
from pekoe.pipeline.rollout.engine import InferenceEngine, Instance
from pekoe.pipeline.rollout.engine_memory import check_engine_memory

logger = logging.getLogger(__name__)

PAGE = os.sysconf("SC_PAGE_SIZE")


class EngineHost:
    """The engine of this process, and the calls under way."""

    def __init__(self, build: Build, writer: asyncio.StreamWriter, descriptors: Sequence[int]) -> None:
        self._build = build
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._verbs = ThreadPoolExecutor(1, "engine-verbs")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._engine: InferenceEngine | None = None
        numbers = [*descriptors, *[None] * NUM_BUCKETS][:NUM_BUCKETS]
        self._incoming = BucketReader([ReceivedBucket(number) for number in numbers], self._send_soon)

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until Close or the end of the rank's stream."""
        beat = asyncio.ensure_future(self._report())
        start = asyncio.ensure_future(self._call(0, self._make))
        while (body := await framed_stream.read(reader)) is not None:
            message = decode(body)
            match message:
                case Generate():
                    self._begin(message.number, self._generate(message))
                case Cancel():
                    if (found := self._tasks.get(message.number)) is not None:
                        found.cancel()
                case Verb():
                    self._begin(message.number, self._call(message.number, partial(self._do, message)))
                case Chunk() | LoadEnd():
                    self._incoming.frames.put(message)
                case Close():
                    await self._close()
                    break
        beat.cancel()
        start.cancel()

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[number] = task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _make(self) -> None:
        """On the verbs thread."""
        build = self._build
        check_engine_memory(build.engine, build.settings)
        kind = resolve(INFERENCE_ENGINES, build.engine, "rollout.backend")
        self._engine = kind.build(build.settings, Instance(), self._on_failure)

    def _on_failure(self, error: BaseException) -> None:
        """Called by the engine, on any thread."""
        self._send_soon(Failed(RemoteError.of(error)))

    def _do(self, verb: Verb) -> Any:
        """On the verbs thread."""
        assert self._engine is not None
        if verb.name == "load_weights":
            return self._load(verb.number, *verb.arguments)
        value = getattr(self._engine, verb.name)(*verb.arguments, **dict(verb.options))
        if verb.name == "sleep":
            _return_free_memory()
        return value

    def _load(self, number: int, version: int) -> None:
        assert self._engine is not None
        tensors = self._incoming.tensors(number)
        try:
            self._engine.load_weights(tensors, version)
            left = sum(1 for _ in tensors)
        finally:
            tensors.close()
        if left:
            raise RuntimeError(f"the engine did not read the last {left} tensors of version {version}")

    async def _generate(self, message: Generate) -> None:
        assert self._engine is not None
        try:
            response = await self._engine.generate(message.request)
        except asyncio.CancelledError:
            return
        except Exception as error:
            self._send(Answer(message.number, error=RemoteError.of(error), gauges=self._read_gauges()))
        else:
            self._send(Answer(message.number, response, gauges=self._read_gauges()))

    async def _call(self, number: int, work: Callable[[], Any]) -> None:
        try:
            value = await self._loop.run_in_executor(self._verbs, work)
        except Exception as error:
            self._send(Answer(number, error=RemoteError.of(error), gauges=self._read_gauges()))
        else:
            self._send(Answer(number, value, gauges=self._read_gauges()))

    async def _close(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    async def _report(self) -> None:
        while True:
            self._send(Gauges(self._read_gauges()))
            await asyncio.sleep(self._build.gauge_seconds)

    def _read_gauges(self) -> dict[str, float]:
        """Of the engine, where it has any to give, and of the process."""
        with open("/proc/self/statm", encoding="ascii") as statm:
            found = {"resident_bytes": float(int(statm.read().split()[1]) * PAGE)}
        if self._engine is not None:
            try:
                found |= self._engine.gauges()
            except RuntimeError:
                logger.debug("the engine's gauges cannot be read", exc_info=True)
        return found

    def _send(self, message: ToRank) -> None:
        """On the loop's thread."""
        self._writer.write(encode(message))

    def _send_soon(self, message: Taken | Failed) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._send, message)


def serve(channel: socket.socket, descriptors: Sequence[int]) -> None:
    """Never returns: the process ends with all that it has started, after a failure with its traceback in the log."""
    try:
        asyncio.run(_serve(channel, descriptors))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        kill_descendants()
        os._exit(1)
    os._exit(0)


async def _serve(channel: socket.socket, descriptors: Sequence[int]) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    body = await framed_stream.read(reader)
    if body is None:
        return
    build = decode(body)
    assert isinstance(build, Build)
    sys.path.extend(entry for entry in build.path if entry not in sys.path)
    form = "%(asctime)s engine process %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=build.log_level, format=form)
    await EngineHost(build, writer, descriptors).run(reader)
    kill_descendants()
    os._exit(0)


def _return_free_memory() -> None:
    """What the C library keeps of freed memory goes back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
