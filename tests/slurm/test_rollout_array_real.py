"""A rollout array of three serves a trainer: two elements are killed, one is requeued; the trainer never stops."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from conftest import TinyJob
from driver_jobs import assert_nothing_left, attempts, ledger_step, start_now
from virtual_cluster import Cluster

from pekoe.launch.submitted_jobs import jobs_of
from pekoe.pipeline.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runs"))

from test_rollout_array import check_history, worlds

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(290)]

NUM_STEPS = 60


def pekoe(cluster: Cluster, tiny_job: TinyJob, *arguments: object) -> str:
    command = [sys.executable, "-m", "pekoe.launch.cli", *map(str, arguments)]
    return cluster.run(command, seconds=60, variables=tiny_job.variables).stdout


def test_an_array_of_three_serves_a_trainer(cluster: Cluster, tiny_job: TinyJob) -> None:
    config = tiny_job.config(
        "served",
        **{
            "allocation": "fsdp:d1", "rollout_array.enabled": True, "rollout_array.lease_seconds": 5.0,
            "rollout_array.poll_seconds": 0.2, "reward.name": "slow_reward:slow_digit_share",
            "reward.args": {"seconds": 0.05},
            "total_train_steps": NUM_STEPS, "total_train_epochs": 400, "recover.freq_steps": 10,
            "cluster.n_gpus_per_node": 1, "cluster.site": "virtual",
        },
    )  # fmt: skip
    said = pekoe(cluster, tiny_job, "submit", config)
    run = tiny_job.run("served")
    trainer = jobs_of(RunDirectory(run))[-1].job_id
    array = pekoe(
        cluster, tiny_job, "submit", "--rollout-array", run, "--array", "0-2", "allocation=hf:d1",
        "cluster.continue_by=requeue", "cluster.slurm.partition=low",
    )  # fmt: skip
    (job,) = (path.stem for path in (run / "slurm" / "rollout-arrays").glob("*.json"))
    assert job in array
    cluster.wait_for(lambda: ledger_step(run) >= 2, 90, f"step 2 of {run}: {said}")
    cluster.wait_for(lambda: len(worlds(run)) == 3, 60, "three worlds")
    first, second = (ids_of(cluster, job, element) for element in (0, 1))
    cluster.wait_for(lambda: held_by(run) >= 2, 60, "leases held by two worlds")
    os.kill(rank_of(cluster, first), signal.SIGKILL)
    assert cluster.wait(f"{job}_0") == "FAILED"
    assert_nothing_left(cluster, first)
    step = ledger_step(run)
    assert step < NUM_STEPS - 10, "the trainer must still need them"
    cluster.scontrol("requeue", f"{job}_1")
    start_now(cluster, f"{job}_1")
    cluster.wait_for(lambda: len(worlds(run)) == 4, 60, "the requeued element attaches as a new world")
    assert cluster.wait(trainer, seconds=120) == "COMPLETED", cluster.output(trainer)
    check_history(run, NUM_STEPS)
    assert len(attempts(run)) == 1
    assert not list((run / "errors").glob("*.json"))
    for element in (1, 2):
        assert cluster.wait(f"{job}_{element}") == "COMPLETED"
    assert second != first
    assert_nothing_left(cluster, second)


def ids_of(cluster: Cluster, array: str, element: int) -> str:
    """The job id that processes of an element carry."""
    return cluster.facts(f"{array}_{element}")["JobId"]


def rank_of(cluster: Cluster, job: str) -> int:
    """Pid of the rank (not of its supervisor) of an attached world."""
    found = [p for p in cluster.processes(job) if "pekoe.launch.attached_rank" in p.cmdline()]
    return max(found, key=lambda process: process.create_time()).pid


def held_by(run: Path) -> int:
    """Worlds that hold a lease now."""
    return sum(any(path.iterdir()) for path in (run / "leases").glob("*/held"))
