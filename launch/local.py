"""Starts a world on this machine with the `mpiexec` of the PyPI `mpich` wheel, watches it, and says how it ended.

    pekoe run ─► mpiexec ─► proxy ─► supervisor of each rank ─► rank
        ├── signals, verdict over a private folder ──┘
        └─► guardian, which ends the world when this process is killed

mpiexec's own word cannot be trusted: it returns 0 when a rank leaves by `os._exit(0)`, kills the survivors of any non-
zero exit, does not always pass signals on, and waits for ever when a rank dies before MPI_Init. So ranks exit 0
towards it after an orderly end, and the true codes, pids and deaths come from the supervisors' notes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from pekoe.launch import terminal
from pekoe.launch.attempts import first_directory
from pekoe.launch.error_record import ErrorRecord, record_path, write_record
from pekoe.launch.guardian import start_guardian
from pekoe.launch.launch_notes import processes_of, read_notes
from pekoe.launch.rank_log import TERMINAL
from pekoe.launch.stop_signals import EXIT_CONFIGURATION, EXIT_FAILURE, EXIT_REQUEUE, STOP_SIGNALS
from pekoe.launch.supervisor import LAUNCH_DIRECTORY
from pekoe.pipeline.files import read_json
from pekoe.pipeline.observe.heartbeat_files import last_heartbeat
from pekoe.pipeline.run_directory import RunDirectory

POLL_SECONDS = 0.1
KILL_SECONDS = 3.0
"""How long a world in which a rank has died may take to end by itself."""
FORWARDED = (*STOP_SIGNALS, signal.SIGINT)


@dataclass(frozen=True)
class LocalWorld:
    """What to start."""

    run: RunDirectory
    attempt: int
    num_ranks: int
    program: tuple[str, ...]
    """Arguments after `python` of every rank."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""


def find_mpiexec() -> Path:
    """The mpiexec beside this interpreter. FileNotFoundError says how to get it."""
    path = Path(sys.prefix) / "bin" / "mpiexec"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: install the `mpich` package into this environment (pip install mpich)"
        )
    return path


def mpiexec_arguments(mpiexec: Path, num_ranks: int, program: Sequence[str], python: str = sys.executable) -> list[str]:
    """`mpiexec -n N python -u PROGRAM…`."""
    return [str(mpiexec), "-n", str(num_ranks), python, "-u", *program]


def rank_environment(inherited: Mapping[str, str], world: LocalWorld, folder: Path) -> dict[str, str]:
    """The environment of mpiexec: the run's code snapshot comes before every install, then the directory that the run
    was first started from (a user's modules); nothing of another launcher stays."""
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(("PMI_", "PMIX_", "OMPI_", "HYDI_", "MPI_LOCAL"))
    }
    code = str(world.run.code.resolve()) if world.run.code.is_dir() else None
    parts = [part for part in (code, first_directory(world.run), inherited.get("PYTHONPATH")) if part]
    if parts:
        kept["PYTHONPATH"] = os.pathsep.join(parts)
    if sys.stdout.isatty():
        kept[TERMINAL] = os.ttyname(sys.stdout.fileno())
    return {**kept, **world.variables, LAUNCH_DIRECTORY: str(folder)}


def run_local_world(world: LocalWorld) -> int:
    """Starts the world and waits for its end; returns the exit code (0, 75, 78 or 1). Main thread only.

    SIGTERM, SIGUSR2, SIGHUP and the first Ctrl-C reach every rank exactly once; a second Ctrl-C kills the world.
    """
    folder = Path(tempfile.mkdtemp(prefix="pekoe-launch-"))
    try:
        return _Launch(world, folder).wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Launch:
    """One world under way."""

    def __init__(self, world: LocalWorld, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.pending: list[int] = []
        self.delivered: set[tuple[int, int]] = set()
        """(signal, rank)."""
        self.interrupts = 0
        self.told = False
        """Do people know that a stop is under way?"""
        self.dead_since: float | None = None
        self.first_dead: int | None = None
        self.handlers = {number: signal.signal(number, self._on_signal) for number in FORWARDED}
        command = mpiexec_arguments(find_mpiexec(), world.num_ranks, world.program)
        self.guardian = start_guardian(folder, world.run, world.attempt)
        self.process = subprocess.Popen(
            command, env=rank_environment(os.environ, world, folder), stdin=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self) -> int:
        """Returns the exit code; leaves no process behind."""
        try:
            while self.process.poll() is None:
                time.sleep(POLL_SECONDS)
                notes = read_notes(self.folder)
                self._deliver(notes)
                self._watch(notes)
        finally:
            self._kill_all()
            self.guardian.kill()
            self.guardian.communicate()
            terminal.give_back()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
        return self._verdict(read_notes(self.folder))

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            number = signal.SIGTERM
        if number not in self.pending:
            self.pending.append(number)

    def _deliver(self, notes: Mapping[int, Mapping[str, Any]]) -> None:
        """Signals go to supervisors, which forward them; a rank that is not there yet gets them when it is."""
        if self.pending and not self.told:
            self.told = True
            once_more = " (once more: end at once)" if self.interrupts else ""
            terminal.say(f"stopping: the step ends, a checkpoint is written{once_more}", above_display=True)
        if self.interrupts > 1:
            self._record_interrupt()
            self._kill_all()
        for number in self.pending:
            for rank, note in notes.items():
                if (number, rank) not in self.delivered and "code" not in note:
                    self.delivered.add((number, rank))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(note["supervisor"]), number)

    def _watch(self, notes: Mapping[int, Mapping[str, Any]]) -> None:
        """The process manager gets a few seconds to end a world in which somebody died; then it is killed."""
        if self.dead_since is None:
            dead = [rank for rank, note in notes.items() if _died(note)]
            if dead:
                self.dead_since = time.monotonic()
                self.first_dead = dead[0]
        elif time.monotonic() - self.dead_since > KILL_SECONDS:
            self._kill_all()

    def _kill_all(self) -> None:
        """Everything of this world that still lives, known by its environment, dies; mpiexec is reaped."""
        if self.process.poll() is None:
            self.process.kill()
        deadline = time.monotonic() + KILL_SECONDS
        while time.monotonic() < deadline:
            survivors = processes_of(self.folder)
            if not survivors:
                break
            for process in survivors:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        self.process.wait()

    def _verdict(self, notes: Mapping[int, Mapping[str, Any]]) -> int:
        """Codes of an orderly end count; anything else is a failure, and has a record when this returns."""
        codes = [int(note["code"]) for note in notes.values() if "code" in note]
        orderly = [int(note["code"]) for note in notes.values() if note.get("orderly")]
        unsound = [int(note["code"]) for note in notes.values() if "code" in note and not note.get("orderly")]
        if not unsound and len(orderly) == self.world.num_ranks:
            return max(orderly)
        failed = record_path(self.world.run, self.world.attempt).exists()
        if not unsound and not failed and EXIT_REQUEUE in orderly:
            return EXIT_REQUEUE
        if EXIT_CONFIGURATION in codes or self.process.returncode == EXIT_CONFIGURATION:
            return EXIT_CONFIGURATION
        self._record_death(notes)
        return EXIT_FAILURE

    def _record_interrupt(self) -> None:
        """Written before the world is killed: no rank is to blame."""
        run = self.world.run
        text = (
            "ended at once by the user (second Ctrl-C), without a checkpoint of the last steps; "
            f"continue from the newest checkpoint with `pekoe run --resume {run.path}`"
        )
        host = socket.gethostname()
        write_record(run, ErrorRecord(self.world.attempt, -1, host, "", "stopping", 0.0, text))

    def _record_death(self, notes: Mapping[int, Mapping[str, Any]]) -> None:
        """Writes the record that a supervisor could not write because it was killed itself."""
        run, attempt = self.world.run, self.world.attempt
        if not record_path(run, attempt).exists():
            rank = self.first_dead if self.first_dead is not None else -1
            heartbeat = _last_heartbeat(run, attempt, rank)
            code = self.process.returncode
            reason = f"the rank vanished (mpiexec: {code})"
            if rank < 0:
                reason = f"a rank vanished, which one is not known (mpiexec: {code})"
            if not notes:
                reason = f"mpiexec ended with {code} before any rank started"
            write_record(
                run,
                ErrorRecord(
                    attempt=attempt, rank=rank, host=heartbeat.get("host", socket.gethostname()),
                    role=heartbeat.get("role", ""), phase=heartbeat.get("phase", "start"),
                    phase_seconds=float(heartbeat.get("phase_seconds", 0.0)), error=reason,
                ),
            )  # fmt: skip
        record = read_json(record_path(run, attempt))
        known = {name: record[name] for name in ErrorRecord.__dataclass_fields__ if name in record}
        terminal.say(ErrorRecord(**known).sentence())
        terminal.say(f"the record is {record_path(run, attempt)}", fresh=False)


def _died(note: Mapping[str, Any]) -> bool:
    """Its supervisor says so, or is gone without a word."""
    if "code" in note or "supervisor" not in note:
        return not note.get("orderly", False)
    return not Path(f"/proc/{note['supervisor']}").exists()


def _last_heartbeat(run: RunDirectory, attempt: int, rank: int) -> dict[str, Any]:
    """Plain, {} where nothing was heard of the rank."""
    heartbeat = last_heartbeat(run, attempt, rank)
    return {} if heartbeat is None else dict(msgspec.to_builtins(heartbeat))
