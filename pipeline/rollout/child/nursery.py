"""The rank's side of the nursery: `start` before MPI is initialised, `spawn` whenever an engine is built."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pekoe.pipeline.child_processes import end_keeper, start_keeper
from pekoe.pipeline.process_tree import kill_marked
from pekoe.pipeline.rollout.child.nursery_process import GONE_SECONDS, MAX_MESSAGE
from pekoe.pipeline.rollout.engine import EngineFailedError

START_SECONDS = 30.0
"""For the nursery to start a process (which then imports and builds at its own pace)."""
KILL_SECONDS = GONE_SECONDS + 2.0
"""For the nursery to kill a child; then it is killed itself, and its children with it."""
CLOSE_SECONDS = 10.0


@dataclass
class EngineProcess:
    """One process of the nursery, with the stream to it."""

    number: int
    channel: socket.socket
    pid: int = 0
    marker: str = ""
    """NAME=value in the environment of the process and of all that it starts."""
    how: str = ""
    """How it ended, once it has: `exited with code 1`."""
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, how: str) -> None:
        if not self.ended.is_set():
            self.how = how
            self.started.set()
            self.ended.set()


class EngineNursery:
    """Starts processes for engines and hears of their ends. All of them end with this rank, or at `close`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._living: dict[int, EngineProcess] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def start(self) -> EngineNursery:
        """Returns at once. Call it before MPI is initialised, on the main thread."""
        self._process, self._channel = start_keeper(
            "pekoe.pipeline.rollout.child.nursery_process", "the engine nursery", socket.SOCK_SEQPACKET
        )
        threading.Thread(target=self._listen, args=(self._channel,), name="nursery", daemon=True).start()
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self, descriptors: Sequence[int] = ()) -> EngineProcess:
        """A new host process, given a stream and `descriptors`. EngineFailedError when it does not start."""
        ours, theirs = socket.socketpair()
        process = EngineProcess(next(self._numbers), ours)
        with theirs:
            with self._lock:
                self._living[process.number] = process
            if not self._say({"start": process.number}, (theirs.fileno(), *descriptors)):
                process.end("was not started: its nursery has ended")
            elif not process.started.wait(START_SECONDS):
                process.end(f"was not started within {START_SECONDS:g} s")
                self.kill(process)
        if process.ended.is_set():
            with self._lock:
                self._living.pop(process.number, None)
            ours.close()
            raise EngineFailedError(f"the engine's process {process.how}")
        return process

    def kill(self, process: EngineProcess, *, stacks: bool = False) -> None:
        """Ends a process and all that it started; returns when they are gone. A second call does nothing. With `stacks`
        it first writes to its log what its threads do, if it can."""
        if process.ended.is_set():
            return
        self._say({"kill": process.number, "stacks": stacks})
        if not process.ended.wait(KILL_SECONDS) and self._process is not None:
            self._process.kill()
            process.ended.wait(KILL_SECONDS)

    def close(self) -> None:
        """Ends the nursery and with it every engine's process."""
        process, channel, self._process = self._process, self._channel, None
        if process is not None and channel is not None:
            end_keeper(process, channel, CLOSE_SECONDS)

    def __enter__(self) -> EngineNursery:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, message: dict[str, int], descriptors: Sequence[int] = ()) -> bool:
        """False when the nursery has ended."""
        if self._channel is None or self._process is None:
            return False
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], list(descriptors))
        except OSError:
            return False
        return True

    def _listen(self, channel: socket.socket) -> None:
        """The nursery's thread in the rank: returns when the nursery is gone."""
        while data := _receive(channel):
            message: dict[str, Any] = json.loads(data)
            number = int(message.get("started", message.get("refused", message.get("ended", 0))))
            with self._lock:
                process = self._living.get(number)
                if process is not None and "started" not in message:
                    del self._living[number]
            if process is None:
                continue
            if "started" in message:
                process.pid, process.marker = int(message["pid"]), str(message["marker"])
                process.started.set()
            elif "refused" in message:
                process.end(f"was not started: {message['why']}")
            else:
                process.end(str(message["how"]))
        with self._lock:
            orphans, self._living = list(self._living.values()), {}
        for process in orphans:
            if process.marker:
                kill_marked(process.marker)
            process.end("ended with its nursery")


def _receive(channel: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return channel.recv(MAX_MESSAGE)
    return b""
