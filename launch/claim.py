"""One driver at a time for a run: who begins its next attempt takes a claim first, a file that only one can create.

    RUN/claims/0.json, 1.json, …   each start of a driver that was let in: job, restarts of the job, host, process
    RUN/claims/0.ended, …          it has ended in order

The newest claim counts. While its owner may live, a second claimant is turned away and has touched nothing. The claim
of an owner that is dead does not block: the next number is taken, and of many who try, one gets it. No lock is held
(on shared filesystems locks may lie), and no claim is ever taken away.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from pekoe.launch import numbered_files
from pekoe.launch.job_states import LIVING, read_state
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.terminal import say
from pekoe.pipeline import files
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory

FOLDER = "claims"
DRAINING_SECONDS = 60.0
"""How long a claimant waits for a job that is just ending, or for a controller that gives no answer."""
POLL_SECONDS = 1.0
REMOTE_SILENCE_SECONDS = 60.0
"""An owner outside Slurm on another host is taken for dead when neither it nor a rank was heard for so long."""
CLOCK_SECONDS = 5.0
"""What a host's clock may be set by while it is up: times of start move with it."""
LEAVING = "COMPLETING"


@dataclass(frozen=True)
class Owner:
    """A start of a driver."""

    host: str
    pid: int
    began: float
    """Of the process, seconds since 1970: tells it from a later one with its number."""
    claimed: float
    job_id: str | None
    """Slurm's, `<array job>_<element>` in an array; None outside Slurm."""
    restarts: int
    """How often Slurm has requeued that job."""
    output: str = ""
    """The file that it prints to; empty for a terminal or a pipe."""

    def is_running_here(self) -> bool:
        """Whether it is a process of this machine, by the host's name and the time of its start."""
        began = _began(self.pid) if self.host == socket.gethostname() else None
        return began is not None and abs(began - self.began) < CLOCK_SECONDS

    def __str__(self) -> str:
        job = f"job {self.job_id} (restart {self.restarts}), " if self.job_id else ""
        return f"{job}pid {self.pid} on {self.host}"


@dataclass(frozen=True)
class Claim:
    """A run that is this process's own, until `release`."""

    path: Path
    owner: Owner

    def release(self) -> None:
        """After the end of the last attempt. A claim that is not released ends with its process or job."""
        files.write_bytes(self.path.with_suffix(".ended"), b"")


def claim(run: RunDirectory, job_id: str | None, restarts: int = 0) -> Claim | None:
    """Takes the run for this process, or says who has it and returns None: then leave with code 0 and touch nothing.

    SlurmError when Slurm does not say within a minute whether the owner's job still runs.
    """
    me = Owner(socket.gethostname(), os.getpid(), _began(os.getpid()) or 0.0, time.time(), job_id, restarts, _output())
    folder = run.path / FOLDER
    deadline = time.monotonic() + DRAINING_SECONDS
    while True:
        number = _newest(folder)
        if number is not None:
            owner = _read(numbered_files.path_of(folder, number))
            if not (folder / f"{number}.ended").exists() and _lives(run, owner, me, deadline):
                say(f"{run.path} is being run by {owner} already; nothing to do here")
                return None
        files.make_folder(folder)
        mine = 0 if number is None else number + 1
        if numbered_files.create(folder, mine, asdict(me)):
            return Claim(numbered_files.path_of(folder, mine), me)


def owners(run: RunDirectory) -> list[Owner]:
    """All who have had the run, oldest first."""
    folder = run.path / FOLDER
    return [_read(numbered_files.path_of(folder, number)) for number in numbered_files.numbers(folder)]


def has_left(run: RunDirectory, job_id: str) -> bool:
    """Whether the job was the last to have the run, and its driver has ended in order."""
    number, owner = _newest(run.path / FOLDER), newest_owner(run)
    if number is None or owner is None or owner.job_id != job_id:
        return False
    return (run.path / FOLDER / f"{number}.ended").exists()


def newest_owner(run: RunDirectory) -> Owner | None:
    """Who took the run last, dead or alive; None if nobody has."""
    number = _newest(run.path / FOLDER)
    return None if number is None else _read(numbered_files.path_of(run.path / FOLDER, number))


def living_owner(run: RunDirectory) -> Owner | None:
    """Who has the run now, as far as this machine and Slurm can tell. SlurmError when Slurm gives no answer."""
    folder = run.path / FOLDER
    number = _newest(folder)
    if number is None or (folder / f"{number}.ended").exists():
        return None
    owner = _read(numbered_files.path_of(folder, number))
    nobody = Owner(socket.gethostname(), 0, 0.0, 0.0, None, 0)
    return owner if _lives(run, owner, nobody, time.monotonic()) else None


def is_over(run: RunDirectory) -> bool:
    """Whether somebody has had the run and certainly nobody has it now; False while Slurm gives no answer."""
    try:
        return newest_owner(run) is not None and living_owner(run) is None
    except SlurmError:
        return False


def is_mine(run: RunDirectory) -> bool:
    """Whether this process is the one that took the run last."""
    owner = newest_owner(run)
    return owner is not None and (owner.host, owner.pid) == (socket.gethostname(), os.getpid())


def _newest(folder: Path) -> int | None:
    return max(numbered_files.numbers(folder), default=None)


def _read(path: Path) -> Owner:
    record = files.read_json(path)
    return Owner(**{name: record[name] for name in Owner.__dataclass_fields__ if name in record})


def _output() -> str:
    """Where this process' standard output goes."""
    try:
        return os.readlink("/proc/self/fd/1") if stat.S_ISREG(os.fstat(1).st_mode) else ""
    except OSError:
        return ""


def _lives(run: RunDirectory, owner: Owner, me: Owner, deadline: float) -> bool:
    """Whether the owner may still touch the run."""
    if owner.job_id is not None and owner.job_id == me.job_id and owner.restarts != me.restarts:
        # a node that was cut off may start late what Slurm has long started again elsewhere
        return owner.restarts > me.restarts
    if owner.host == me.host:
        return owner.is_running_here()
    if owner.job_id is None:
        heard = max([owner.claimed, *(found.time for found in read_heartbeats(run))])
        return time.time() - heard < REMOTE_SILENCE_SECONDS
    return owner.job_id == me.job_id or _job_holds(owner.job_id, deadline)


def _job_holds(job_id: str, deadline: float) -> bool:
    """Whether processes of the job may live. A job that is ending gets time to end."""
    while True:
        try:
            state = read_state(job_id).state
        except SlurmError:
            if time.monotonic() > deadline:
                raise
        else:
            if state != LEAVING:
                return state in LIVING
            if time.monotonic() > deadline:
                return True
        time.sleep(POLL_SECONDS)


def _began(pid: int) -> float | None:
    """When the process began; None if there is none."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
