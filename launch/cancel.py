"""Ends the jobs of a run, wherever they are: the driver is told to stop with a checkpoint, then what is left goes.

USR2 to the batch shell (the driver) ─► the run saves and ends ─► scancel: also of what was put back into the queue,
                                                                  the next job of a chain, and its rollout arrays
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]

from pekoe.launch import slurm_commands
from pekoe.launch.attempts import RunDirectoryError
from pekoe.launch.claim import Owner, living_owner
from pekoe.launch.job_states import LIVING, read_states
from pekoe.launch.rollout_arrays import array_jobs
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.submitted_jobs import jobs_of
from pekoe.pipeline.run_directory import RunDirectory

MARGIN_SECONDS = 30.0
"""Beyond cluster.grace_seconds: for signals on their way, and the end of all processes."""
END_SECONDS = 15.0
"""From the end of a run's driver to that of its job, which writes its result meanwhile; then the job is cancelled."""
POLL_SECONDS = 0.5


def cancel(run: RunDirectory, now: bool = False) -> str:
    """Returns what was done, for people. RunDirectoryError when nothing of the run waits or runs; SlurmError when Slurm
    gives no answer."""
    owner = living_owner(run)
    jobs = _living_jobs(run, owner)
    if not jobs and owner is None:
        raise RunDirectoryError(f"{run.path}: no job of it waits or runs, and no process on this machine")
    deadline = time.monotonic() + (0.0 if now else _grace_seconds(run) + MARGIN_SECONDS)
    said = []
    if owner is not None and owner.job_id is None:
        said.append(_stop_process(owner, now, deadline))
    waiting = [job for job, state in jobs.items() if state == "PENDING"]
    if waiting:
        # the next job of a chain must not start when this one stops
        slurm_commands.cancel(*waiting)
        said.append(f"cancelled {', '.join(waiting)}")
    running = [job for job, state in jobs.items() if state in LIVING]
    if running and not now:
        said.append(_stop_jobs(run, running, deadline))
    left = [job for job in (*_living_jobs(run, owner), *array_jobs(run)) if not _is_interactive(job)]
    if left:
        slurm_commands.cancel(*left)
        said.append(f"cancelled {', '.join(left)}")
    return "; ".join(said) or "nothing was left to cancel"


def _living_jobs(run: RunDirectory, owner: Owner | None) -> dict[str, str]:
    """Jobs of the run that wait or run, and their states."""
    known = [entry.job_id for entry in jobs_of(run) if entry.kind == "slurm"]
    if owner is not None and owner.job_id is not None and owner.job_id not in known:
        known.append(owner.job_id)
    states = read_states(known) if known else {}
    return {job: state.state for job, state in states.items() if not state.has_ended}


def _stop_jobs(run: RunDirectory, jobs: Sequence[str], deadline: float) -> str:
    """Each driver forwards the signal to its ranks; ranks of an interactive allocation get it themselves."""
    interactive = {job for job in jobs if _is_interactive(job)}
    for job in jobs:
        flags = [] if job in interactive else ["--batch"]
        slurm_commands.ask(["scancel", "--signal=USR2", *flags, job])
    left_at: float | None = None
    while time.monotonic() < deadline:
        living = {job for job, state in read_states(jobs).items() if state.state in LIVING}
        if left_at is None and living_owner(run) is None:
            left_at = time.monotonic()
        has_left = left_at is not None and time.monotonic() - left_at > END_SECONDS
        if not living or (left_at is not None and living <= interactive) or has_left:
            return f"{', '.join(jobs)} stopped"
        time.sleep(POLL_SECONDS)
    if left_at is not None:
        return f"{', '.join(jobs)} stopped"
    return f"{', '.join(jobs)} did not stop in time"


def _stop_process(owner: Owner, now: bool, deadline: float) -> str:
    """A driver outside Slurm: two interrupts end it at once, as two Ctrl-C do."""
    if owner.host != socket.gethostname():
        raise RunDirectoryError(f"the run is driven by {owner}; run `pekoe cancel` there")
    with contextlib.suppress(ProcessLookupError):
        if now:
            os.kill(owner.pid, signal.SIGINT)
            time.sleep(POLL_SECONDS)
        os.kill(owner.pid, signal.SIGINT if now else signal.SIGTERM)
    deadline = max(deadline, time.monotonic() + MARGIN_SECONDS)
    while owner.is_running_here() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if owner.is_running_here():
        with contextlib.suppress(psutil.Error):
            psutil.Process(owner.pid).kill()
        return f"process {owner.pid} did not stop in time and was killed"
    return f"process {owner.pid} stopped"


def _is_interactive(job: str) -> bool:
    """A shell of a person holds it (salloc): its steps are ended, the allocation is left."""
    try:
        facts: dict[str, Any] = slurm_commands.job_facts(job)
    except SlurmError:
        return False
    return facts.get("BatchFlag") == "0"


def _grace_seconds(run: RunDirectory) -> float:
    from pekoe.pipeline.config.load import load

    return float(load(run.config).cluster.grace_seconds)
