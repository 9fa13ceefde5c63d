"""A run whose rollout rank is on another kind of node: one heterogeneous job, one world over both components."""

from __future__ import annotations

import pytest
from conftest import TinyJob
from driver_jobs import START_SECONDS, assert_nothing_left, ledger_step, newest_checkpoint, settings, wait_for_step
from virtual_cluster import Cluster

from pekoe.launch.run_errors import RunStoppedError
from pekoe.launch.submit import resume, submit
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]


def test_a_heterogeneous_job_is_stopped_and_resumed(login: Cluster, tiny_job: TinyJob) -> None:
    values = settings(**{
        "cluster.n_nodes": 1, "cluster.rollout_nodes.n_nodes": 1, "cluster.slurm.nodelist": "n3",
        "total_train_steps": 200, "cluster.grace_seconds": 20.0,
    })  # fmt: skip
    (job,) = submit(tiny_job.config("two-kinds", **values))
    run = tiny_job.run("two-kinds")
    wait_for_step(login, job.job_id, run, 2)
    assert job.state == "RUNNING"
    places = {beat.heartbeat.role: beat.heartbeat.host for beat in read_heartbeats(job.run)}
    assert places["trainer"] == "n3"
    assert places["rollout"] in ("n1", "n2", "n4")
    assert f"{job.job_id} stopped" in job.cancel()
    with pytest.raises(RunStoppedError, match="pekoe resume"):
        job.result(timeout=90)
    step = ledger_step(run)
    assert newest_checkpoint(run) == step
    assert not login.run(["squeue", "--noheader"]).stdout.strip()
    assert_nothing_left(login, job.job_id)
    assert_nothing_left(login, str(int(job.job_id) + 1))

    again = resume(job.run, [f"total_train_steps={step + 2}"])
    result = again.result(timeout=START_SECONDS)
    assert (result.attempt, result.steps, result.outcome) == (1, step + 2, "done")
    assert login.wait(again.job_id) == "COMPLETED"
