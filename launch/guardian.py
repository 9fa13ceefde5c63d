"""Outlives a local launcher that was killed: `python -m pekoe.launch.guardian FOLDER RUN ATTEMPT LAUNCHER_PID`.

    pekoe run ──pipe──► guardian          end of the pipe = the launcher is gone
        └──► mpiexec ─► supervisors ◄── SIGTERM, and after STOP_SECONDS SIGKILL to all that still lives

A killed launcher passes nothing on, and mpiexec does not notice. The guardian stands in a session of its own, holds
nothing but the read end of a pipe whose write end only the launcher has, and is killed by it after an ordinary end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from pekoe.launch.error_record import ErrorRecord, write_record
from pekoe.launch.launch_notes import processes_of, read_notes
from pekoe.launch.stop_signals import EXIT_DONE
from pekoe.launch.supervisor import LAUNCH_DIRECTORY
from pekoe.pipeline.run_directory import RunDirectory

POLL_SECONDS = 0.1
STOP_SECONDS = 7.0
"""From the stop signal to the kill of ranks whose launcher is gone."""
KILL_SECONDS = 2.0


def start_guardian(folder: Path, run: RunDirectory, attempt: int) -> subprocess.Popen[bytes]:
    """Starts it for this process; its `stdin` must stay open, unused, for as long as the world lives."""
    arguments = ["-m", "pekoe.launch.guardian", str(folder), str(run.path), str(attempt), str(os.getpid())]
    environment = {name: value for name, value in os.environ.items() if name != LAUNCH_DIRECTORY}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True,
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Waits for the end of the launcher, then ends its world and removes its folder."""
    folder, run = Path(arguments[0]), RunDirectory(Path(arguments[1]))
    attempt, launcher = int(arguments[2]), int(arguments[3])
    while os.read(0, 4096):
        pass
    if not folder.is_dir():
        return 0
    _tell(f"the launcher (pid {launcher}) is gone: its ranks stop now, within {STOP_SECONDS:.0f} s")
    began = time.monotonic()
    _stop(folder)
    seconds = time.monotonic() - began
    notes = read_notes(folder)
    if not notes or not all(note.get("orderly") for note in notes.values()):
        how = f"were killed {seconds:.0f} s later" if processes_of(folder) else "ended without a checkpoint"
        error = f"the launcher (pid {launcher}) was killed and its ranks {how}"
        record = ErrorRecord(
            attempt=attempt, rank=-1, host=socket.gethostname(), role="", phase="stopping",
            phase_seconds=round(seconds, 1), error=error,
        )  # fmt: skip
        if write_record(run, record):
            _tell(record.sentence())
    _kill(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if not notes or any(note.get("code") != EXIT_DONE for note in notes.values()):
        _tell(f"continue with `pekoe run --resume {run.path}`")
    return 0


def _stop(folder: Path) -> None:
    """SIGTERM to each supervisor, once, as soon as it is there; returns when nothing lives or the time is over."""
    told: set[int] = set()
    deadline = time.monotonic() + STOP_SECONDS
    while processes_of(folder) and time.monotonic() < deadline:
        for rank, note in read_notes(folder).items():
            if rank not in told and "code" not in note and "supervisor" in note:
                told.add(rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(note["supervisor"]), signal.SIGTERM)
        time.sleep(POLL_SECONDS)


def _kill(folder: Path) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while (survivors := processes_of(folder)) and time.monotonic() < deadline:
        for process in survivors:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def _tell(text: str) -> None:
    """For people, if somebody still reads."""
    with contextlib.suppress(OSError):
        print(f"pekoe: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
