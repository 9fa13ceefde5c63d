"""The Python stacks of a rank's threads: told by the rank itself, or got out of it by a signal.

`STACKS_SIGNAL` makes a rank write them into its log from C code (faulthandler): that works while its main thread stands
still inside a library, whether it holds the interpreter's lock or not. It is a real-time signal, since libraries and
batch systems take SIGUSR1, SIGUSR2, SIGTERM and SIGHUP for themselves.
"""

from __future__ import annotations

import faulthandler
import linecache
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline.messages import STACKS_LIMIT

STACKS_SIGNAL = signal.SIGRTMIN + 7
DUMP_SECONDS = 0.8
"""For a signalled process to write its stacks."""
MAX_FRAMES = 60
"""Of one thread; the innermost are kept."""
LOOK_SECONDS = 0.02
QUIET_LOOKS = 8
"""A log that has grown and then not for so many looks: the dump is over."""


@dataclass(frozen=True)
class ThreadStack:
    """One thread: its calls as (file, line, function), newest last."""

    name: str
    calls: tuple[tuple[str, int, str], ...]
    num_left_out: int


def capture(first: Mapping[str, str]) -> list[ThreadStack]:
    """The stacks of all threads of this process now, those named in `first` before all others. Touches no file."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[ThreadStack] = []
    for ident, frame in sys._current_frames().items():
        calls = []
        innermost = frame
        while innermost is not None:
            calls.append((innermost.f_code.co_filename, innermost.f_lineno or 0, innermost.f_code.co_name))
            innermost = innermost.f_back  # type: ignore[assignment]
        kept = tuple(reversed(calls[:MAX_FRAMES]))
        found.append(ThreadStack(names.get(ident, f"unknown {ident}"), kept, len(calls) - len(kept)))
    return sorted(found, key=lambda stack: (stack.name not in first, stack.name))


def describe(stacks: list[ThreadStack], doing: Mapping[str, str], limit: int = STACKS_LIMIT) -> str:
    """Like tracebacks, with source lines; `doing` says what a thread of this name does. At most `limit` characters."""
    lines = []
    for stack in stacks:
        phase = doing.get(stack.name)
        lines.append(f'Thread "{stack.name}"{f" ({phase})" if phase else ""}, newest call last:')
        if stack.num_left_out:
            lines.append(f"  ({stack.num_left_out} outer calls left out)")
        for file, number, function in stack.calls:
            lines.append(f'  File "{file}", line {number}, in {function}')
            source = linecache.getline(file, number).strip()
            if source:
                lines.append(f"    {source}")
    return cut("\n".join(lines), limit)


def cut(text: str, limit: int = STACKS_LIMIT) -> str:
    mark = "\n(the rest is cut)"
    return text if len(text) <= limit else text[: limit - len(mark)] + mark


def answer_signal() -> None:
    """From now on STACKS_SIGNAL makes this process write its stacks to standard error (its log)."""
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)


def dump_by_signal(pid: int, log: Path, seconds: float = DUMP_SECONDS) -> str:
    """The stacks of another process of this host, which writes them into `log`; else what the kernel says of it.

    Waits for at most `seconds`. A process that does not catch the signal is left alone.
    """
    status = _status(pid)
    if not status:
        return f"process {pid} is gone"
    state = f"process {pid} is in state {status.get('State', '?')}"
    if not int(status.get("SigCgt", "0"), 16) >> (STACKS_SIGNAL - 1) & 1:
        return f"{state}; it takes no request for its stacks"
    size = _size(log)
    try:
        os.kill(pid, STACKS_SIGNAL)
    except (ProcessLookupError, PermissionError) as error:
        return f"{state}; {error}"
    dump = _read_growth(log, size, seconds)
    if not dump:
        return f"{state}; it has not shown its stacks within {seconds} s"
    return cut(f"{state}; asked by a signal:\n{dump}")


def _read_growth(log: Path, start: int, seconds: float) -> str:
    size, num_quiet = start, 0
    for _ in range(math.ceil(seconds / LOOK_SECONDS)):  # on a machine that stalls, a deadline would be over at once
        newest = _size(log)
        num_quiet = num_quiet + 1 if newest == size else 0
        size = newest
        if size > start and num_quiet >= QUIET_LOOKS:
            break
        time.sleep(LOOK_SECONDS)
    if size <= start:
        return ""
    with open(log, "rb") as file:
        file.seek(start)
        return file.read(STACKS_LIMIT).decode(errors="replace").strip()


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _status(pid: int) -> dict[str, str]:
    """`/proc/PID/status`; empty when the process is gone."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}
