"""A run that sbatch started with a script, looked at and stopped by its run directory alone."""

from __future__ import annotations

import sys

import pytest
from conftest import TinyJob
from driver_jobs import TRAIN, TWO_NODES, assert_nothing_left, newest_checkpoint, settings, wait_for_step
from virtual_cluster import Cluster

from pekoe.launch.run_errors import RunStoppedError
from pekoe.launch.run_jobs import RunJob

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]


def pekoe(cluster: Cluster, tiny_job: TinyJob, *arguments: object) -> str:
    command = [sys.executable, "-m", "pekoe.launch.cli", *map(str, arguments)]
    return cluster.run(command, seconds=90, variables=tiny_job.variables).stdout


def test_a_job_of_a_script_is_watched_and_cancelled_by_its_run_directory(login: Cluster, tiny_job: TinyJob) -> None:
    config, run = tiny_job.config("script", **settings(total_train_steps=200)), tiny_job.run("script")
    job = login.sbatch(TRAIN, *TWO_NODES, arguments=[config], cwd=tiny_job.folder, variables=tiny_job.variables)
    wait_for_step(login, job, run, 1)
    handle = RunJob.of(run)
    assert (handle.job_id, handle.state) == (job, "RUNNING")
    assert f"job {job} (script): RUNNING on n[1-2]" in pekoe(login, tiny_job, "status", run)
    said = pekoe(login, tiny_job, "logs", run)
    assert f"==> {login.folder}/job-{job}-" in said
    assert "pekoe: run directory" in said
    assert f"{job} stopped" in pekoe(login, tiny_job, "cancel", run)
    with pytest.raises(RunStoppedError, match="pekoe resume"):
        handle.result(timeout=150)
    assert handle.has_ended
    assert newest_checkpoint(run) > 0
    assert "ended with code 75" in pekoe(login, tiny_job, "status", run)
    assert_nothing_left(login, job)
    said = pekoe(login, tiny_job, "status", run)
    assert "2 ended" in said
