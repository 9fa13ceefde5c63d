"""How each attempt of a run began and ended, from what it left behind.

`run.json` counts it, an error record says that it failed, `logs/N/end.json` that its head left in order, heartbeats who
lives; of an attempt without these the log is asked.
"""

from __future__ import annotations

import enum
import json
import re
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pekoe.pipeline.observe.heartbeat_files import HeartbeatFile, read_heartbeats
from pekoe.pipeline.observe.waits import SILENT_SECONDS
from pekoe.pipeline.run_directory import RunDirectory

LOG_TAIL_BYTES = 1 << 20
STOP = re.compile(r"signal (\d+): stopping at the next boundary")
CUT_OFF = "after the stop signal, in phase"
REQUEUE = 75


class End(enum.StrEnum):
    """How an attempt ended."""

    RUNNING = "still running"
    FINISHED = "finished"
    STOPPED = "stopped"
    CUT_OFF = "stopped by a signal and not over in its grace period"
    FAILED = "failed"
    DIED = "died without a word"
    UNHEARD = "began, and nothing was heard of it"


@dataclass(frozen=True)
class AttemptFacts:
    """One attempt, as far as its files tell."""

    number: int
    end: End
    began: float | None = None
    """Seconds since 1970."""
    host: str = ""
    launcher: str = ""
    stopped_by: str = ""
    """What stopped it: the name of a signal, or the end of the job's time."""
    record: dict[str, Any] = field(default_factory=dict)
    """Its error record, if it has one."""


def read_attempts(run: RunDirectory, now: float) -> list[AttemptFacts]:
    """All attempts that left a trace, in order. Never raises for damaged files: what they would tell is left out."""
    begun = dict(enumerate(_recorded(run)))
    numbers = set(begun)
    numbers |= {int(path.name) for path in (run.path / "logs").glob("*") if path.name.isdecimal()}
    numbers |= {int(path.stem.partition("-")[2]) for path in run.errors.glob("attempt-*.json") if _is_numbered(path)}
    beats = read_heartbeats(run)
    numbers |= {beat.attempt for beat in beats}
    last = max(numbers, default=-1)
    found = []
    for number in sorted(numbers):
        entry = begun.get(number, {})
        own = [beat for beat in beats if beat.attempt == number]
        record = read_record(run.errors / f"attempt-{number}.json")
        log = _tail(run.logs(number) / "rank-0.log")
        note = read_record(run.logs(number) / "end.json")
        end = _end(record is not None, note, own, log, now, is_last=number == last)
        found.append(
            AttemptFacts(
                number,
                end,
                began=_number(entry.get("began")),
                host=str(entry.get("host", "")),
                launcher=str(entry.get("launcher", "")),
                stopped_by=_stopped_by(note, log) if end in (End.STOPPED, End.CUT_OFF) else "",
                record=record or {},
            )
        )
    return found


def lives(beat: HeartbeatFile, now: float) -> bool:
    """Whether a rank still runs: on this host its process is looked for, another's last heartbeat must be young."""
    if beat.heartbeat.phase == "ended":
        return False
    if beat.heartbeat.host != socket.gethostname():
        return beat.age_seconds(now) < SILENT_SECONDS
    try:
        return b"pekoe" in Path(f"/proc/{beat.heartbeat.pid}/cmdline").read_bytes()
    except OSError:
        return False


def read_record(path: Path) -> dict[str, Any] | None:
    """An error record; {} for a damaged one, None where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def sentence(record: dict[str, Any]) -> str:
    """An error record in one line."""
    if not record:
        return "its error record cannot be read"
    error = str(record.get("error", "unknown"))
    if record.get("rank", -1) == -1:
        return error
    who = f"rank {record['rank']} ({record.get('role') or 'no role yet'}, {record.get('host', '?')})"
    return f"{who} in phase {str(record.get('phase', '?'))!r}: {error}"


def _end(
    failed: bool, note: dict[str, Any] | None, beats: list[HeartbeatFile], log: str, now: float, is_last: bool
) -> End:
    """`note`: what the head wrote when it left; None where there is none, {} for a damaged one."""
    if failed:
        return End.FAILED
    if is_last and any(lives(beat, now) for beat in beats):
        return End.RUNNING
    if CUT_OFF in log:
        return End.CUT_OFF
    if note is not None:
        return End.STOPPED if note.get("code", REQUEUE if STOP.search(log) else 0) == REQUEUE else End.FINISHED
    if beats and all(beat.heartbeat.phase == "ended" for beat in beats):
        return End.STOPPED if STOP.search(log) else End.FINISHED
    if not beats and not log and is_last:
        return End.UNHEARD
    return End.DIED


def _stopped_by(note: dict[str, Any] | None, log: str) -> str:
    stop = STOP.search(log)
    number = (note or {}).get("signal", int(stop[1]) if stop else None)
    return _signal_name(number) if isinstance(number, int) else "the end of the job's time"


def _recorded(run: RunDirectory) -> list[dict[str, Any]]:
    try:
        entries = json.loads(run.run_json.read_bytes())["attempts"]
        return [entry if isinstance(entry, dict) else {} for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _is_numbered(path: Path) -> bool:
    return path.stem.partition("-")[2].isdecimal()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: Path) -> str:
    """The end of a log; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
