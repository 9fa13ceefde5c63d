"""The supervisor: owns the workers of one rank, starts them, gives them calls, and kills what overruns its time.

Started by the rank before MPI is initialised; afterwards the rank itself starts no process, and the supervisor,
which knows nothing of MPI, replaces workers whenever needed. The loops and what they wait for:

    listen       waits for the rank's frames; the end of that stream (rank closed or dead) ends everything
    run_slot     one per worker: waits for a call, then for the worker's answer, at most `timeout_seconds`
    watch_rank   waits for the rank's death where a forked copy of the rank holds the stream open
"""

from __future__ import annotations

import asyncio
import collections
import math
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

import msgspec

from pekoe.pipeline.child_processes import ignore_job_signals, start_child
from pekoe.pipeline.process_tree import adopt_orphans, has_ended, kill_all, reap_orphans
from pekoe.pipeline.reward.frames import (
    Answer,
    AnyFrame,
    Call,
    Failed,
    Forget,
    Frame,
    Load,
    Loaded,
    Setup,
    Workers,
    encode,
    read_frame,
)

MARKER = "PEKOE_REWARD_WORKER"
POLL_SECONDS = 1.0
GONE_SECONDS = 30.0


class WorkerLostError(Exception):
    """The worker ended, or sent what is no answer."""


@dataclass
class Worker:
    """One child process, leader of its own session."""

    process: subprocess.Popen[bytes]
    marker: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    loaded: set[str] = field(default_factory=set)
    ending: str = ""
    """How it ended; empty as long as `end` was not called."""

    async def ask(self, frame: Frame, limit_seconds: float) -> AnyFrame:
        """Sends a frame and gives the answer. Raises TimeoutError or WorkerLostError."""
        try:
            async with asyncio.timeout(limit_seconds):
                self.writer.write(encode(frame))
                await self.writer.drain()
                answer = await read_frame(self.reader)
        except (ConnectionError, ValueError, msgspec.ValidationError) as error:
            raise WorkerLostError(str(error)) from error
        if answer is None:
            raise WorkerLostError("the stream ended")
        return answer

    async def end(self) -> str:
        """Kills it and all that came from it; returns how it ended, when it is reaped. A second call does nothing."""
        if not self.ending:
            self.ending = "the process ended" if has_ended(self.process.pid) else "the process was killed"
            kill_all(self.process.pid, self.marker)
            self.writer.close()
            deadline = time.monotonic() + GONE_SECONDS
            while (code := self.process.poll()) is None and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            self.ending += f" with code {code}"
        return self.ending


class Supervisor:
    """All state of the supervisor's process."""

    def __init__(self, setup: Setup, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._setup = setup
        self._rank = rank
        """Process id."""
        self._reader = reader
        self._writer = writer
        self._calls: collections.deque[Call] = collections.deque()
        self._work = asyncio.Condition()
        self._workers: dict[int, Worker] = {}
        self._num_started = 0

    async def run(self) -> None:
        """Returns when the rank is gone; no process is left."""
        loops = [self._listen(), self._watch_rank(self._rank), *map(self._run_slot, range(self._setup.processes))]
        tasks = [asyncio.ensure_future(loop) for loop in loops]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                self._send(Failed(str(result) or repr(result)))
        await asyncio.gather(*(worker.end() for worker in self._workers.values()))
        reap_orphans(set())

    async def _listen(self) -> None:
        while (frame := await read_frame(self._reader)) is not None:
            async with self._work:
                if isinstance(frame, Call):
                    self._calls.append(frame)
                    self._work.notify()
                elif isinstance(frame, Forget):
                    self._calls = collections.deque(call for call in self._calls if call.number != frame.number)

    async def _watch_rank(self, rank: int) -> None:
        while os.getppid() == rank:
            await asyncio.sleep(POLL_SECONDS)
            reap_orphans({worker.process.pid for worker in self._workers.values()})

    async def _run_slot(self, slot: int) -> None:
        while True:
            self._workers[slot] = worker = await self._start()
            for target in self._setup.targets:
                await self._load(worker, target)
            if len(self._workers) == self._setup.processes:
                self._send(Workers(tuple(worker.process.pid for worker in self._workers.values())))
            while await self._serve(worker):
                pass
            await self._workers.pop(slot).end()

    async def _start(self) -> Worker:
        """A new worker; the child's death signal needs that this is the main thread."""
        ours, theirs = socket.socketpair()
        self._num_started += 1
        marker = f"{MARKER}={os.getpid()}.{self._num_started}"
        with theirs:
            process = start_child("pekoe.pipeline.reward.worker", (theirs.fileno(),), marker)
        reader, writer = await asyncio.open_connection(sock=ours)
        return Worker(process, marker, reader, writer)

    async def _load(self, worker: Worker, target: str) -> None:
        """Raises RuntimeError when the function cannot be had: without it there is no pool."""
        try:
            answer = await worker.ask(Load(target, self._setup.path), self._setup.start_seconds)
        except TimeoutError:
            raise RuntimeError(f"reward.name: loading {target!r} took over {self._setup.start_seconds} s") from None
        except WorkerLostError as error:
            raise RuntimeError(f"reward.name: a process ended while it loaded {target!r}: {error}") from error
        if not isinstance(answer, Loaded) or answer.error:
            raise RuntimeError(f"reward.name: cannot load {target!r}:\n{getattr(answer, 'error', answer)}")
        worker.loaded.add(target)

    async def _serve(self, worker: Worker) -> bool:
        """One call; False when the worker must be replaced."""
        async with self._work:
            await self._work.wait_for(lambda: bool(self._calls))
            if has_ended(worker.process.pid):
                self._work.notify()
                return False
            call = self._calls.popleft()
        if call.target not in worker.loaded:
            await self._load(worker, call.target)
        limit = self._setup.timeout_seconds
        try:
            answer = await worker.ask(call, limit)
        except TimeoutError:
            self._send(Answer(call.number, math.nan, "timeout", f"no answer within {limit:g} s", limit))
            return False
        except WorkerLostError as error:
            self._send(Answer(call.number, math.nan, "died", f"{error}: {await worker.end()}", 0.0))
            return False
        if not isinstance(answer, Answer) or answer.number != call.number:
            self._send(Answer(call.number, math.nan, "died", "the process sent what is no answer to its call", 0.0))
            return False
        self._send(answer)
        return True

    def _send(self, frame: Frame) -> None:
        self._writer.write(encode(frame))


async def supervise(channel: socket.socket, rank: int) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    setup = await read_frame(reader)
    if isinstance(setup, Setup):
        await Supervisor(setup, rank, reader, writer).run()
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())], timeout=POLL_SECONDS)


def main() -> None:
    adopt_orphans()
    ignore_job_signals()
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    asyncio.run(supervise(channel, int(sys.argv[2])))


if __name__ == "__main__":
    main()
