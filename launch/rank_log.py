"""Where a rank's output goes: `RUN/logs/<attempt>/rank-N.log` takes stdout, stderr and logging.

The head also talks to people. Redirection is by file descriptor, so that output of C libraries and of a crash lands in
the log too.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import sys
from pathlib import Path
from typing import IO, Any

from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

TERMINAL = "PEKOE_TERMINAL"
"""Path of the terminal that the run was started from; set by the local launcher."""


def log_path(run: RunDirectory, attempt: int, rank: int) -> Path:
    return run.logs(attempt) / f"rank-{rank}.log"


class PeopleStream(io.TextIOBase):
    """The head's `sys.stdout`: what is printed goes to people, and to the log unless it is a terminal's live
    display."""

    def __init__(self, people: IO[str], log: IO[str]) -> None:
        self._people = people
        self._log = log

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._people.isatty()

    def fileno(self) -> int:
        return self._people.fileno()

    def write(self, text: str) -> int:
        if not self.isatty():
            self._log.write(text)
        return self._people.write(text)

    def flush(self) -> None:
        self._people.flush()
        self._log.flush()


class LogFile(io.FileIO):
    """A log on a disk that may be full: what it has no room for is lost, and nobody who prints fails for it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if not files.is_full(error):
                raise
            return memoryview(data).nbytes


def _open_stream(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(LogFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", line_buffering=True)


def open_log(path: Path, rank: int, is_head: bool) -> None:
    """Redirects this process' output into the log, once; logging and faulthandler follow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    people = _open_people() if is_head else None
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    log = _open_stream(1)
    sys.stdout = PeopleStream(people, log) if people is not None else log
    sys.stderr = _open_stream(2)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    _start_logging(rank, is_head)


def _start_logging(rank: int, is_head: bool) -> None:
    form = logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    to_log = logging.StreamHandler(sys.stderr)
    to_log.setFormatter(form)
    handlers: list[logging.Handler] = [to_log]
    if is_head and isinstance(sys.stdout, PeopleStream):
        to_people = logging.StreamHandler(sys.stdout._people)
        to_people.setLevel(logging.WARNING)
        to_people.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        handlers.append(to_people)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)


def _open_people() -> IO[str]:
    """The terminal itself where there is one (a display needs its size), else the standard output that was
    inherited."""
    name = os.environ.get(TERMINAL)
    descriptor = os.open(name, os.O_WRONLY | os.O_NOCTTY) if name and os.path.exists(name) else os.dup(1)
    return open(descriptor, "w", encoding="utf-8", errors="replace", buffering=1)
