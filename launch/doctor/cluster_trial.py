"""A real world for some seconds: two nodes of the site, started as a run's world is, or two ranks on this machine.

    in a job:    trial_step ─► srun (or mpiexec) ─► rank_probe on every rank
    at a login:  salloc ─► the site's set-up lines ─► trial_step ─► …
    else:        mpiexec ─► rank_probe

Bounded in time, and nothing stays: the job ends with this process, the trial's folder is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from pekoe.launch import slurm_commands
from pekoe.launch.allocation import place
from pekoe.launch.batch_script import BatchJob, batch_script
from pekoe.launch.doctor.rank_probe import Said, Spec, TrialReport, heard
from pekoe.launch.doctor.trial_step import PROGRAM, trial_config
from pekoe.launch.environment import for_step
from pekoe.launch.local import find_mpiexec, mpiexec_arguments
from pekoe.launch.slurm_commands import without_identity
from pekoe.pipeline import files
from pekoe.pipeline.config.load import to_yaml
from pekoe.pipeline.config.run import RunConfig

QUEUE_SECONDS = 15.0
TRIAL_SECONDS = 35.0
END_SECONDS = 3.0
POLL_SECONDS = 0.05
NOT_OF_SALLOC = ("--output", "--error", "--open-mode", "--signal", "--requeue", "--no-requeue", "--array", "--mail")
GRANTED = re.compile(r"Granted job allocation (\d+)")
PENDING = re.compile(r"Pending job allocation (\d+)")


@dataclass
class Outcome:
    """What became of the trial."""

    how: str
    """What started it, for people."""
    num_nodes: int
    num_ranks: int
    command: str = ""
    """Of the step, as far as it is for people."""
    salloc: str = ""
    """Flags that ask for such an allocation."""
    report: TrialReport | None = None
    alone: list[str] = field(default_factory=list)
    """Ranks that found no world."""
    refused: str = ""
    phase: str = ""
    """The last one that was reached."""
    words: list[str] = field(default_factory=list)
    """What launcher and ranks wrote beside."""
    job: str = ""
    waited: bool = False
    """The queue gave no nodes in time."""
    timed_out: bool = False
    code: int | None = None


def run_trial(config: RunConfig, where: str, num_nodes: int) -> Outcome:
    """`where`: job (this process is in one), login, or here. ValueError when none can be made of this configuration."""
    small = trial_config(config, num_nodes)
    root = existing(Path(config.cluster.fileroot).expanduser().absolute())
    small.cluster.fileroot = str(root)
    folder = f".pekoe-doctor-{os.urandom(4).hex()}"
    ranks = place(small).world_size
    probe = msgspec.json.encode(Spec(ranks, str(root), folder, config.cluster.device)).decode()
    outcome = Outcome("", num_nodes, ranks)
    if where == "here":
        command = mpiexec_arguments(find_mpiexec(), ranks, [*PROGRAM, probe])
        outcome.how = "mpiexec on this machine"
    else:
        step = [sys.executable, "-m", "pekoe.launch.doctor.trial_step", to_yaml(small), probe]
        command, outcome.how = step, "this job"
        if where == "login":
            command, outcome.salloc = _allocation(small, step)
            outcome.how = "a job of its own"
    try:
        _Started(command, outcome, QUEUE_SECONDS if where == "login" else None).wait()
    finally:
        with contextlib.suppress(OSError):
            files.put_away(root / folder)
    return outcome


def existing(folder: Path) -> Path:
    """It, or the nearest folder above it that is there."""
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _allocation(config: RunConfig, step: list[str]) -> tuple[list[str], str]:
    """(salloc and what it runs, its flags for people): the flags and the shell of a job of this site."""
    job = BatchJob("pekoe-doctor", tuple(step), "/dev/null")
    script = batch_script(job, config, place(config))
    flags = [
        flag
        for line in script.splitlines()
        if line.startswith("#SBATCH ")
        for flag in shlex.split(line.removeprefix("#SBATCH "))
        if not flag.startswith(NOT_OF_SALLOC)
    ]
    shell = ["bash", "-l", "-c"] if config.cluster.slurm.setup else ["bash", "-c"]
    shown = [flag for flag in flags if not flag.startswith(("--job-name", "--time"))]
    return ["salloc", *flags, *shell, script], shlex.join(shown)


class _Started:
    """The trial under way: its lines are read by two threads, its end is awaited by the caller."""

    def __init__(self, command: list[str], outcome: Outcome, queue_seconds: float | None) -> None:
        self.outcome = outcome
        self.granted = threading.Event()
        if queue_seconds is None:
            self.granted.set()
        self.queue_seconds = queue_seconds or 0.0
        environ = for_step(os.environ) if outcome.how == "this job" else without_identity(os.environ)
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self.readers:
            reader.start()

    def wait(self) -> None:
        try:
            end = time.monotonic() + self.queue_seconds
            while not self.granted.is_set() and self.process.poll() is None:
                if time.monotonic() > end:
                    self.outcome.waited = True
                    return
                time.sleep(POLL_SECONDS)
            end = time.monotonic() + TRIAL_SECONDS
            while self.process.poll() is None:
                if time.monotonic() > end:
                    self.outcome.timed_out = True
                    return
                time.sleep(POLL_SECONDS)
        finally:
            self._end()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            said = heard(line)
            if said is not None:
                self._hear(said)
            elif match := GRANTED.search(line):
                self.outcome.job = match[1]
                self.granted.set()
            elif match := PENDING.search(line):
                self.outcome.job = match[1]
            elif line.strip() and not line.startswith("salloc: Relinquishing"):
                self.outcome.words.append(line.rstrip())

    def _hear(self, said: Said) -> None:
        if said.phase.startswith("starting "):
            self.outcome.command = said.phase.removeprefix("starting ")
        self.outcome.phase = said.phase or self.outcome.phase
        self.outcome.refused = said.refused or self.outcome.refused
        self.outcome.report = said.report or self.outcome.report
        if said.alone:
            self.outcome.alone.append(said.alone)

    def _end(self) -> None:
        """All of it is over when this returns, the job included."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_SECONDS)
        if self.outcome.job and (self.outcome.waited or self.outcome.timed_out):
            with contextlib.suppress(slurm_commands.SlurmError):
                slurm_commands.cancel(self.outcome.job)
        for reader in self.readers:
            reader.join(END_SECONDS)
        self.outcome.code = self.process.poll()
