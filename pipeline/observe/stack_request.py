"""`pekoe status RUN --stacks`: asks a living run what the threads of all its ranks are doing.

    the command ── heartbeats/stacks-request.json ──► the leader of each node looks at it with its heartbeats,
        ◄── logs/ATTEMPT/stacks-rank-N.txt ──          asks the ranks of its node, and writes their answers

A request is read by one process a node, never by every rank. A process of this host that nobody answers for is asked by
a signal.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from pekoe.pipeline.observe.heartbeat_files import HeartbeatFile, read_heartbeats
from pekoe.pipeline.observe.stacks import DUMP_SECONDS, dump_by_signal
from pekoe.pipeline.run_directory import RunDirectory

ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.1
LOOKS_PER_SECOND = 2000
"""For answers, at most: the folder is on the shared filesystem of a run that is in trouble already."""
MAX_PRINTED = 16
"""Ranks whose stacks are printed; those of all lie in the files."""


def request_path(run: RunDirectory) -> Path:
    return run.heartbeats / "stacks-request.json"


def answer_path(run: RunDirectory, attempt: int, rank: int) -> Path:
    return run.logs(attempt) / f"stacks-rank-{rank}.txt"


def read_request(run: RunDirectory) -> str:
    """The id of the newest request; empty if there is none (or it is not whole yet)."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(request_path(run).read_bytes())["id"])
    return ""


def write_answer(run: RunDirectory, attempt: int, rank: int, request: str, text: str) -> None:
    """Replaces a rank's file whole; its first line says which request it answers."""
    _replace(answer_path(run, attempt, rank), f"{_first_line(request)}\n{text}\n")


def request_stacks(run_path: Path | str, seconds: float = ANSWER_SECONDS) -> str:
    """Asks, waits for at most about `seconds`, and tells in a text for people. ValueError where nothing ever ran."""
    run = RunDirectory(Path(run_path))
    beats = read_heartbeats(run)
    if not beats:
        raise ValueError(f"{run_path}: no rank of this run has sent a heartbeat")
    living = [beat for beat in beats if beat.heartbeat.phase != "ended"]
    if not living:
        return "no rank is alive: all have ended in order"
    request = uuid.uuid4().hex
    _replace(request_path(run), json.dumps({"id": request, "time": time.time()}) + "\n")
    answers = _gather(run, request, living, seconds)
    for beat in living:
        if beat.heartbeat.rank not in answers:
            answers[beat.heartbeat.rank] = _unanswered(run, beat, seconds)
    shown = "\n\n".join(answers[beat.heartbeat.rank] for beat in living[:MAX_PRINTED])
    more = len(living) - MAX_PRINTED
    where = answer_path(run, living[0].attempt, 0).with_name("stacks-rank-*.txt")
    return f"{shown}\n\n{f'{more} more ranks: ' if more > 0 else ''}see {where}"


def _gather(run: RunDirectory, request: str, living: list[HeartbeatFile], seconds: float) -> dict[int, str]:
    """The answers that come in time, by rank."""
    found: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    while True:
        missing = [beat for beat in living if beat.heartbeat.rank not in found]
        left = deadline - time.monotonic()
        for beat in missing:
            rank = beat.heartbeat.rank
            first, _, text = _read(answer_path(run, beat.attempt, rank)).partition("\n")
            if first == _first_line(request):
                found[rank] = text.strip()
        if len(found) == len(living) or left <= 0:
            return found
        time.sleep(min(left, max(POLL_SECONDS, len(missing) / LOOKS_PER_SECOND)))


def _unanswered(run: RunDirectory, beat: HeartbeatFile, seconds: float) -> str:
    last = beat.heartbeat
    text = (
        f"rank {last.rank} ({last.role}, {last.host}): no answer within {seconds:g} s; last heartbeat "
        f"{beat.age_seconds(time.time()):.0f} s ago, in phase {last.phase!r}"
    )
    if last.host != socket.gethostname():
        return text
    log = run.logs(beat.attempt) / f"rank-{last.rank}.log"
    return f"{text}\n{dump_by_signal(last.pid, log, DUMP_SECONDS)}"


def _first_line(request: str) -> str:
    return f"request {request}"


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    os.replace(part, path)
