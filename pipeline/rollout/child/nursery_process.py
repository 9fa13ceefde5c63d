"""The nursery: starts a rank's engine processes whenever they are wanted, and ends them, whatever happens to the rank.

Started before MPI is initialised; it imports nothing heavy. It waits for the rank's words and for the end of a child.
The end of the rank (of its stream, or of the process where a forked copy holds the stream open) ends everything.

    rank ──► {"start": n} + descriptors, {"kill": n, "stacks": true: after it has written what its threads do}
    rank ◄── {"started": n, "pid": …, "marker": …} or {"refused": n, "why": …}; {"ended": n, "how": …}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from pekoe.pipeline.child_processes import ignore_job_signals, start_child
from pekoe.pipeline.observe.stacks import STACKS_SIGNAL
from pekoe.pipeline.process_tree import adopt_orphans, has_ended, kill_all, reap_orphans

MARKER = "PEKOE_ENGINE_CHILD"
HOST = "pekoe.pipeline.rollout.child.host"
LOOK_SECONDS = 1.0
GONE_SECONDS = 4.0
STACKS_SECONDS = 0.3
"""For a process that is stuck to write the stacks of its threads, if it still can."""
MAX_MESSAGE = 65536
MAX_DESCRIPTORS = 16


@dataclass
class Child:
    """One engine process, leader of its own session."""

    process: subprocess.Popen[bytes]
    marker: str


class Nursery:
    """All state of the nursery's process."""

    def __init__(self, channel: socket.socket, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._children: dict[int, Child] = {}
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)

    def run(self) -> None:
        """Returns when the rank is gone; no process is left."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while os.getppid() == self._rank:
            ready = {descriptor for descriptor, _ in poller.poll(LOOK_SECONDS * 1000)}
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._wake, 4096):
                        pass
            if self._channel.fileno() in ready and not self._listen():
                break
            self._look_after_children()
        for number in list(self._children):
            self._end(number)

    def _listen(self) -> bool:
        """One word of the rank; False at the end of the stream."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE, MAX_DESCRIPTORS)
        except ConnectionError:
            return False
        if not data:
            return False
        message = json.loads(data)
        if "start" in message:
            self._start(int(message["start"]), descriptors)
        elif (child := self._children.get(message["kill"])) is not None:
            if message["stacks"] and not has_ended(child.process.pid):
                os.kill(child.process.pid, STACKS_SIGNAL)
                time.sleep(STACKS_SECONDS)
            self._end(int(message["kill"]))
        return True

    def _start(self, number: int, descriptors: list[int]) -> None:
        marker = f"{MARKER}={self._rank}.{os.getpid()}.{number}"
        try:
            child = Child(start_child(HOST, descriptors, marker), marker)
        except OSError as error:
            self._say(refused=number, why=str(error))
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._children[number] = child
        self._say(started=number, pid=child.process.pid, marker=marker)

    def _look_after_children(self) -> None:
        for number, child in list(self._children.items()):
            if has_ended(child.process.pid):
                self._end(number)
        reap_orphans({child.process.pid for child in self._children.values()})

    def _end(self, number: int) -> None:
        """Kills a child, unless it has ended, and all that came from it; says how it ended when it is reaped."""
        child = self._children.pop(number)
        kill_all(child.process.pid, child.marker)
        deadline = time.monotonic() + GONE_SECONDS
        while (code := child.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        reap_orphans(set())
        self._say(ended=number, how=_how(code))

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(ConnectionError):
            self._channel.send(json.dumps(message).encode())


def _how(code: int | None) -> str:
    if code is None:
        return f"is not gone {GONE_SECONDS:g} s after SIGKILL"
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with code {code}"


def main() -> None:
    adopt_orphans()
    ignore_job_signals()
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    Nursery(channel, int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
