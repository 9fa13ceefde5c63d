"""Heartbeats on disk: `RUN/heartbeats/rank-N.json`, replaced whole, written by one leader per node in a thread of its
own, which also looks whether somebody asks for stacks."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from pekoe.pipeline import files
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.observe.stack_request import read_request, request_path
from pekoe.pipeline.run_directory import RunDirectory


def write_heartbeat(run: RunDirectory, attempt: int, heartbeat: Heartbeat) -> None:
    """Replaces a rank's file atomically; not synced to disk, since the next one comes in seconds.

    A full disk is when people look at heartbeats: then the blocks that the file has already are written over.
    """
    path = run.heartbeats / f"rank-{heartbeat.rank}.json"
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    value = {**msgspec.to_builtins(heartbeat), "attempt": attempt, "time": time.time()}
    data = (json.dumps(value, sort_keys=True) + "\n").encode()
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if not files.is_full(error):
            raise
        _write_over(path, data)


def _write_over(path: Path, data: bytes) -> None:
    """In one write, filled up with spaces, so that a reader sees the old or the new text."""
    with open(path, "r+b", buffering=0) as file:
        file.write(data.ljust(os.fstat(file.fileno()).st_size))


class HeartbeatFiles:
    """Takes heartbeats at once and writes the newest of each rank; a full disk costs files, never the run."""

    def __init__(
        self, run: RunDirectory, attempt: int, on_request: Callable[[str], None] = lambda request: None
    ) -> None:
        """`on_request(id)` is called, in a thread of its own, when somebody asks for the stacks of this node."""
        self._run = run
        self._attempt = attempt
        self._changed = threading.Condition()
        self._newest: dict[int, Heartbeat] = {}
        """What is to be written, one of each rank: a filesystem that hangs costs no memory."""
        self._closing = False
        self._on_request = on_request
        self._request_changed = self._stamp()
        self._complained = False
        run.heartbeats.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._write_all, name="heartbeat-files", daemon=True)
        self._thread.start()

    def put(self, heartbeat: Heartbeat) -> None:
        with self._changed:
            self._newest[heartbeat.rank] = heartbeat
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
            for heartbeat in newest.values():
                self._write(heartbeat)
            if closing:
                return
            self._look_for_request()

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

    def _write(self, heartbeat: Heartbeat) -> None:
        try:
            write_heartbeat(self._run, self._attempt, heartbeat)
        except OSError as error:
            if not self._complained:
                self._complained = True
                with suppress(OSError):
                    print(f"pekoe: heartbeat files cannot be written: {error}", file=sys.stderr, flush=True)
