"""Heartbeats on disk: `RUN/heartbeats/node-HOST.json`, the newest of all ranks of a host, replaced whole.

Its leader writes it, in a thread of its own, which also looks whether somebody asks for stacks. Until then a rank that
is starting has a file of its own (`rank-N.json`), which the leader removes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from pekoe.pipeline import files
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.observe.heartbeat_files import node_path, rank_path
from pekoe.pipeline.observe.stack_request import read_request, request_path
from pekoe.pipeline.run_directory import RunDirectory

BLOCK = 4096
"""Files are whole multiples of it: on a full disk the next text still fits over the old one. The spaces come before the
last bracket, so that a file that was cut off does not look whole."""
LONGEST_PAUSE = 5.0
NODES_PER_SECOND = 200


def seconds_between_writes(heartbeat_seconds: float, num_nodes: int) -> float:
    """Of a node's file: every interval; on very many nodes less often, to spare the shared filesystem."""
    return max(heartbeat_seconds, min(LONGEST_PAUSE, num_nodes / NODES_PER_SECOND))


def write_heartbeat(run: RunDirectory, attempt: int, heartbeat: Heartbeat) -> None:
    """Of a rank whose node has no file yet: it is starting."""
    _replace(rank_path(run, heartbeat.rank), {**_plain(heartbeat, time.time()), "attempt": attempt})


def write_node(run: RunDirectory, attempt: int, host: str, beats: Mapping[int, tuple[Heartbeat, float]]) -> None:
    """Replaces a node's file atomically. `beats`: by rank the newest, and when it came (seconds since 1970)."""
    ranks = [_plain(heartbeat, when) for _, (heartbeat, when) in sorted(beats.items())]
    _replace(node_path(run, host), {"attempt": attempt, "host": host, "ranks": ranks})


def _plain(heartbeat: Heartbeat, when: float) -> dict[str, object]:
    return {**msgspec.to_builtins(heartbeat), "time": when}


def _replace(path: Path, value: dict[str, object]) -> None:
    """Not synced to disk, since the next one comes in seconds.

    A full disk is when people look at heartbeats: then the blocks that the file has already are written over.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    data = json.dumps(value, sort_keys=True).encode()
    data = data[:-1].ljust((len(data) // BLOCK + 1) * BLOCK - 2) + b"}\n"
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if not files.is_full(error) or len(data) > path.stat().st_size:
            raise
        _write_over(path, data)


def _write_over(path: Path, data: bytes) -> None:
    """In one write, filled up with spaces, so that a reader sees the old or the new text."""
    with open(path, "r+b", buffering=0) as file:
        file.write(data.ljust(os.fstat(file.fileno()).st_size))


class HeartbeatFiles:
    """Takes heartbeats at once and writes the newest of each rank; a full disk costs files, never the run."""

    def __init__(
        self, run: RunDirectory, attempt: int, host: str, pause_seconds: float,
        on_request: Callable[[str], None] = lambda request: None,
    ) -> None:  # fmt: skip
        """`pause_seconds` lie between two writes; `on_request(id)` is called, in a thread of its own, when somebody
        asks for the stacks of this node."""
        self._run = run
        self._attempt = attempt
        self._host = host
        self._pause = pause_seconds
        self._changed = threading.Condition()
        self._newest: dict[int, tuple[Heartbeat, float]] = {}
        """What is to be written, one of each rank: a filesystem that hangs costs no memory."""
        self._written: dict[int, tuple[Heartbeat, float]] = {}
        """What the file holds."""
        self._closing = False
        self._on_request = on_request
        self._request_changed = self._stamp()
        self._complained = False
        run.heartbeats.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._write_all, name="heartbeat-files", daemon=True)
        self._thread.start()

    def put(self, heartbeat: Heartbeat) -> None:
        with self._changed:
            self._newest[heartbeat.rank] = (heartbeat, time.time())
            self._changed.notify()

    def close(self, seconds: float = 2.0) -> None:
        """Writes what waits, for at most so long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest or self._closing)
                newest, self._newest = self._newest, {}
                closing = self._closing
            if newest:
                self._write(newest)
            if closing:
                return
            self._look_for_request()
            with self._changed:
                self._changed.wait_for(lambda: self._closing, self._pause)

    def _look_for_request(self) -> None:
        stamp = self._stamp()
        if stamp == self._request_changed:
            return
        self._request_changed = stamp
        request = read_request(self._run)
        if request:
            threading.Thread(target=self._on_request, args=(request,), name="stacks-request", daemon=True).start()

    def _stamp(self) -> tuple[int, int]:
        """Changes whenever the request is replaced."""
        with suppress(OSError):
            found = request_path(self._run).stat()
            return found.st_mtime_ns, found.st_ino
        return 0, 0

    def _write(self, newest: Mapping[int, tuple[Heartbeat, float]]) -> None:
        """The file of the node; ranks that were not in it yet need their own no more."""
        first_time = newest.keys() - self._written.keys()
        written = {**self._written, **newest}
        try:
            write_node(self._run, self._attempt, self._host, written)
            for rank in first_time:
                rank_path(self._run, rank).unlink(missing_ok=True)
            self._written = written
        except OSError as error:
            if not self._complained:
                self._complained = True
                with suppress(OSError):
                    print(f"pekoe: heartbeat files cannot be written: {error}", file=sys.stderr, flush=True)
