"""How a world that was started inside an allocation has ended, from its files: the exit code, and a record where no
rank could write one."""

from __future__ import annotations

import socket
import time

from pekoe.launch import terminal
from pekoe.launch.error_record import END_NOTE, ErrorRecord, read_record, record_path, write_record
from pekoe.launch.run_errors import UNHEARD
from pekoe.launch.stop_signals import EXIT_CONFIGURATION, EXIT_FAILURE, EXIT_REQUEUE
from pekoe.pipeline import files
from pekoe.pipeline.observe.heartbeat_files import HeartbeatFile, read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory

NOTE_SECONDS = 5.0
"""How late what the head wrote last may be seen on another node."""


def verdict(run: RunDirectory, attempt: int, launcher: str, code: int, stopped: bool) -> int:
    """The exit code of the attempt; `code` is that of `launcher` (srun, mpiexec), `stopped`: a stop signal had come.

    Only what the head noted and the launcher confirms counts as a good end. Every failure has a record afterwards.
    """
    record = read_record(run, attempt)
    if record is None:
        noted = noted_code(run, attempt, NOTE_SECONDS if code == 0 else 0.0)
        if noted is not None and (code == 0 or noted == EXIT_CONFIGURATION):
            return noted
        if code == EXIT_CONFIGURATION:
            return EXIT_CONFIGURATION
        if stopped:
            terminal.say(f"the ranks were ended from outside ({launcher}: {code}) before all of them had left")
            return EXIT_REQUEUE
        how = f"{launcher} ended with {code}" if code else f"{launcher} ended well, but the head left no {END_NOTE}"
        record = record_vanished(run, attempt, how)
    terminal.say(record.sentence())
    terminal.say(f"the record is {record_path(run, attempt)}", fresh=False)
    return EXIT_CONFIGURATION if record.code == EXIT_CONFIGURATION else EXIT_FAILURE


def noted_code(run: RunDirectory, attempt: int, seconds: float = 0.0) -> int | None:
    """What the head noted at its orderly end; None if it did not, also not within so many seconds."""
    try:
        return int(files.read_json(run.logs(attempt) / END_NOTE, seconds)["code"])
    except FileNotFoundError:
        return None


def record_vanished(run: RunDirectory, attempt: int, how: str) -> ErrorRecord:
    """Claims the record for a world in which somebody died without a word: blames who was silent first."""
    beats = heartbeats_of(run, attempt)
    alive = [beat for beat in beats if beat.heartbeat.phase != "ended"]
    if not alive:
        record = ErrorRecord(
            attempt,
            -1,
            socket.gethostname(),
            "",
            "start",
            0.0,
            f"{how} {UNHEARD}" if not beats else how,
        )
    else:
        first = min(alive, key=lambda beat: beat.time)
        beat = first.heartbeat
        record = ErrorRecord(
            attempt=attempt, rank=beat.rank, host=beat.host, role=beat.role, phase=beat.phase,
            phase_seconds=beat.phase_seconds, pid=beat.pid,
            error=f"the rank vanished ({how}); it was heard last {first.age_seconds(time.time()):.0f} s ago, before "
            "all others",
        )  # fmt: skip
    write_record(run, record)
    return read_record(run, attempt) or record


def heartbeats_of(run: RunDirectory, attempt: int) -> list[HeartbeatFile]:
    """Of this attempt alone; empty before any rank was heard."""
    return [beat for beat in read_heartbeats(run) if beat.attempt == attempt]
