"""How each attempt of a run began and ended, from what it left behind: `run.json`, error records, heartbeats, logs."""

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
REPORT = re.compile(r"^report: ", re.M)
"""The head's last words in a log, by which an older attempt's end is known."""


class End(enum.StrEnum):
    """How an attempt ended."""

    RUNNING = "still running"
    FINISHED = "finished"
    STOPPED = "stopped by a signal"
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
    signal: str = ""
    """Name of the signal that stopped it."""
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
        end = _end(record is not None, own, log, now, is_last=number == last)
        stop = STOP.search(log)
        found.append(
            AttemptFacts(
                number,
                end,
                began=_number(entry.get("began")),
                host=str(entry.get("host", "")),
                launcher=str(entry.get("launcher", "")),
                signal=_signal_name(int(stop[1])) if stop and end in (End.STOPPED, End.CUT_OFF) else "",
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


def _end(failed: bool, beats: list[HeartbeatFile], log: str, now: float, is_last: bool) -> End:
    if failed:
        return End.FAILED
    if is_last and any(lives(beat, now) for beat in beats):
        return End.RUNNING
    if CUT_OFF in log:
        return End.CUT_OFF
    all_ended = bool(beats) and all(beat.heartbeat.phase == "ended" for beat in beats)
    if all_ended or REPORT.search(log):
        return End.STOPPED if STOP.search(log) else End.FINISHED
    if not beats and not log and is_last:
        return End.UNHEARD
    return End.DIED


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
