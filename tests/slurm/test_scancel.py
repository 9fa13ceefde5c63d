"""`scancel` in each phase of a job's life: the job is CANCELLED, nothing of it stays, and the run can be resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyJob
from driver_jobs import START_SECONDS, assert_nothing_left, ledger_step, settings
from virtual_cluster import Cluster

from pekoe.launch.run_errors import JobEndedError, RunStoppedError
from pekoe.launch.run_jobs import RunJob
from pekoe.launch.submit import resume, submit
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

SLOW_REWARD = {"reward.args": {"seconds": 0.5}}
LATER = {"cluster.slurm.extra": ["--begin=now+3600"]}
SECONDS_TO_RESUME = 150.0


def head_does(run: Path) -> str:
    """What rank 0 says of itself; empty before it is heard."""
    return next((beat.heartbeat.phase for beat in read_heartbeats(RunDirectory(run)) if beat.heartbeat.rank == 0), "")


def attempt_has_begun(run: Path) -> bool:
    return bool(json.loads((run / "run.json").read_text())["attempts"])


PHASES: dict[str, tuple[dict[str, Any], Callable[[RunJob, Path], bool]]] = {
    "pending": (LATER, lambda job, run: job.state == "PENDING"),
    "driver": ({}, lambda job, run: job.state == "RUNNING"),
    "start-up": ({}, lambda job, run: attempt_has_begun(run)),
    "loading": ({}, lambda job, run: "loading" in head_does(run)),
    "rollout": (SLOW_REWARD, lambda job, run: "waiting for the batch of version 0" in head_does(run)),
    "step": ({"recover.freq_steps": 1000}, lambda job, run: ledger_step(run) >= 2),
    "saving": ({"recover.freq_steps": 1}, lambda job, run: any((run / "checkpoints").glob("*.part"))),
}
"""Settings, and how it is known that the phase has come."""
RESUMED = ("pending", "driver", "saving")


@pytest.mark.parametrize("phase", PHASES)
def test_a_job_that_is_cancelled_in_this_phase(login: Cluster, tiny_job: TinyJob, phase: str) -> None:
    own, has_come = PHASES[phase]
    name = f"scancel-{phase}"
    (job,) = submit(tiny_job.config(name, **settings(0.1, total_train_steps=200, **own)))
    run = tiny_job.run(name)
    end = time.monotonic() + START_SECONDS
    while not has_come(job, run):
        assert time.monotonic() < end, f"{phase} has not come: {head_does(run)}"
        time.sleep(0.005)
    login.run(["scancel", job.job_id])
    assert login.wait(job.job_id) == "CANCELLED"
    assert job.state == "CANCELLED"
    assert_nothing_left(login, job.job_id)
    assert not login.run(["squeue", "--noheader"]).stdout.strip()
    with pytest.raises((JobEndedError, RunStoppedError), match="pekoe resume"):
        job.result(timeout=90)
    if phase not in RESUMED:
        return
    step = ledger_step(run)
    again = resume(job.run, [f"total_train_steps={step + 1}", "cluster.slurm.extra=[]"])
    result = again.result(timeout=SECONDS_TO_RESUME)
    assert (result.outcome, result.steps) == ("done", step + 1)
