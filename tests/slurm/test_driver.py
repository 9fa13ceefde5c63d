"""The driver of a job on a real cluster: a death, a cancelled job, what goes on after a lost node or a preemption, with
the result that an undisturbed run has, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TinyJob
from driver_jobs import (
    START_SECONDS,
    STEPS,
    TRAIN,
    TWO_NODES,
    assert_nothing_left,
    attempts,
    consumed,
    error_record,
    fingerprint,
    ledger_step,
    newest_checkpoint,
    rank_processes,
    settings,
    start_now,
    wait_for_step,
)  # fmt: skip
from virtual_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]


def submit(cluster: Cluster, tiny_job: TinyJob, config: Path, *flags: str) -> str:
    """`sbatch FLAGS scripts/train.sbatch CONFIG`."""
    return cluster.sbatch(TRAIN, *flags, arguments=[config], cwd=tiny_job.folder, variables=tiny_job.variables)


@pytest.fixture(scope="session")
def undisturbed(tiny_job: TinyJob) -> Path:
    """A run outside of Slurm that nobody disturbs: what all others must come to."""
    config = tiny_job.config("undisturbed", **settings(**{"cluster.n_nodes": 1, "cluster.n_gpus_per_node": 2}))
    done = subprocess.run(
        [sys.executable, "-m", "pekoe.launch.cli", "run", str(config)], cwd=tiny_job.folder, timeout=120,
        env={**os.environ, **tiny_job.variables, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return tiny_job.run("undisturbed")


def assert_same_result(run: Path, undisturbed: Path) -> None:
    assert ledger_step(run) == STEPS
    assert consumed(run) == consumed(undisturbed)
    assert fingerprint(run) == fingerprint(undisturbed)


def test_a_killed_rank_ends_the_job_at_once(cluster: Cluster, tiny_job: TinyJob) -> None:
    config, run = tiny_job.config("killed", **settings(total_train_steps=200)), tiny_job.run("killed")
    job = submit(cluster, tiny_job, config, *TWO_NODES)
    wait_for_step(cluster, job, run, 2)
    processes = rank_processes(cluster, job, 1)
    assert len(processes) >= 2
    processes[1].kill()
    began = time.monotonic()
    assert cluster.wait(job) == "FAILED"
    assert time.monotonic() - began < 60, "well below cluster.silence_seconds"
    assert cluster.facts(job)["ExitCode"] == "1:0"
    record = error_record(run, 0)
    assert (record["rank"], record["host"], record["role"]) == (1, "n2", "rollout")
    assert "signal 9" in record["error"]
    assert "rank 1 (rollout, n2)" in cluster.output(job)
    assert_nothing_left(cluster, job)


def test_a_rank_that_vanishes_with_its_supervisor_has_a_record_too(cluster: Cluster, tiny_job: TinyJob) -> None:
    config, run = tiny_job.config("vanished", **settings(total_train_steps=200)), tiny_job.run("vanished")
    job = submit(cluster, tiny_job, config, *TWO_NODES)
    wait_for_step(cluster, job, run, 1)
    for process in rank_processes(cluster, job, 1):
        process.kill()
    assert cluster.wait(job) == "FAILED"
    assert error_record(run, 0)["error"]
    assert_nothing_left(cluster, job)


def test_a_cancelled_job_leaves_no_process(cluster: Cluster, tiny_job: TinyJob) -> None:
    config, run = tiny_job.config("cancelled", **settings(total_train_steps=200)), tiny_job.run("cancelled")
    job = submit(cluster, tiny_job, config, *TWO_NODES)
    wait_for_step(cluster, job, run, 1)
    assert len(cluster.processes(job)) > 6, "launcher, srun, supervisors, ranks, reward processes"
    cluster.run(["scancel", job])
    assert cluster.wait(job) == "CANCELLED"
    assert_nothing_left(cluster, job)


def test_a_warning_stops_the_job_with_a_checkpoint_and_the_next_goes_on(
    cluster: Cluster, tiny_job: TinyJob, undisturbed: Path
) -> None:
    """Of a job that is not requeued: its exit code is 75."""
    config, run = tiny_job.config("warned", **settings()), tiny_job.run("warned")
    job = submit(cluster, tiny_job, config, *TWO_NODES)
    wait_for_step(cluster, job, run, 3)
    cluster.run(["scancel", "--signal=USR2", "--batch", job])
    assert cluster.wait(job) == "FAILED"
    assert cluster.facts(job)["ExitCode"] == "75:0"
    step = ledger_step(run)
    assert step < STEPS
    assert newest_checkpoint(run) == step
    assert cluster.output(job).count("stopping:") == 1
    assert_nothing_left(cluster, job)
    again = cluster.sbatch(
        TRAIN, *TWO_NODES, arguments=["--resume", run], cwd=tiny_job.folder, variables=tiny_job.variables
    )
    assert cluster.wait(again, seconds=START_SECONDS) == "COMPLETED", cluster.output(again)
    assert_same_result(run, undisturbed)


def test_restart_in_place_on_the_nodes_that_are_left(cluster: Cluster, tiny_job: TinyJob, undisturbed: Path) -> None:
    """First a rank dies, then a node: a spare one takes its place."""
    name = "in-place"
    config = tiny_job.config(name, **settings(**{"cluster.restart_in_place": 2, "cluster.spare_nodes": 1}))
    run = tiny_job.run(name)
    job = submit(cluster, tiny_job, config, "--nodes=3", "--ntasks-per-node=1", "--no-kill", "--no-requeue")
    wait_for_step(cluster, job, run, 3)
    rank_processes(cluster, job, 1)[1].kill()
    cluster.wait_for(lambda: len(attempts(run)) == 2, 90, "the second attempt")
    wait_for_step(cluster, job, run, 6)
    cluster.scontrol("update", "nodename=n2", "state=down", "reason=test")
    assert cluster.wait(job, seconds=START_SECONDS) == "COMPLETED", cluster.output(job)
    assert len(attempts(run)) == 3
    assert {one["job"] for one in attempts(run)} == {job}
    assert_same_result(run, undisturbed)


def test_a_preempted_job_is_requeued_and_comes_to_the_same_result(
    cluster: Cluster, tiny_job: TinyJob, undisturbed: Path
) -> None:
    name = "preempted"
    config, run = tiny_job.config(name, **settings(**{"cluster.continue_by": "requeue"})), tiny_job.run(name)
    job = submit(cluster, tiny_job, config, *TWO_NODES, "--partition=low", "--requeue")
    wait_for_step(cluster, job, run, 3)
    other = cluster.sbatch("sleep 3", "--nodes=4", "--exclusive", "--partition=high")
    cluster.wait(other)
    start_now(cluster, job)
    assert cluster.wait(job, seconds=START_SECONDS) == "COMPLETED", cluster.output(job)
    assert [one["restarts"] for one in attempts(run)] == [0, 1]
    assert {path.name for path in (run / "logs").iterdir()} == {"0", "1"}
    assert_same_result(run, undisturbed)


def test_a_job_that_loses_a_node_is_requeued_and_comes_to_the_same_result(
    cluster: Cluster, tiny_job: TinyJob, undisturbed: Path
) -> None:
    name = "lost-node"
    config, run = tiny_job.config(name, **settings(**{"cluster.continue_by": "requeue"})), tiny_job.run(name)
    job = submit(cluster, tiny_job, config, *TWO_NODES, "--requeue")
    wait_for_step(cluster, job, run, 3)
    cluster.scontrol("update", "nodename=n2", "state=down", "reason=test")
    start_now(cluster, job)
    assert cluster.wait(job, seconds=START_SECONDS) == "COMPLETED", cluster.output(job)
    assert [one["restarts"] for one in attempts(run)] == [0, 1]
    assert_same_result(run, undisturbed)


def test_a_time_limit_makes_a_chain_of_jobs(cluster: Cluster, tiny_job: TinyJob, undisturbed: Path) -> None:
    """Of one minute, which Slurm warns of up to half a minute early: each job has some seconds."""
    name = "chain"
    chain = {"cluster.continue_by": "chain", "cluster.slurm.signal_seconds": 15, "cluster.grace_seconds": 15}
    config, run = tiny_job.config(name, **settings(reward_seconds=0.25, **chain)), tiny_job.run(name)
    job = submit(cluster, tiny_job, config, *TWO_NODES, "--time=1", "--signal=B:USR2@15", "--no-requeue")
    cluster.wait_for(lambda: ledger_step(run) == STEPS and fingerprint_is_there(run), 200, "the end of the chain")
    cluster.wait_for(lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip(), 60, "no job waits")
    jobs = [one["job"] for one in attempts(run)]
    assert jobs[0] == job
    assert len(set(jobs)) == len(jobs) >= 2
    assert_same_result(run, undisturbed)


def test_a_chain_ends_with_a_cancelled_job(cluster: Cluster, tiny_job: TinyJob) -> None:
    chain = {"cluster.continue_by": "chain", "cluster.grace_seconds": 15, "cluster.slurm.signal_seconds": 15}
    config, run = tiny_job.config("cut", **settings(total_train_steps=200, **chain)), tiny_job.run("cut")
    job = submit(cluster, tiny_job, config, *TWO_NODES, "--no-requeue")
    wait_for_step(cluster, job, run, 1)
    waiting = cluster.run(["squeue", "--noheader", "--format=%i %T"]).stdout.splitlines()
    assert len(waiting) == 2, waiting
    cluster.run(["scancel", job])
    assert cluster.wait(job) == "CANCELLED"
    cluster.wait_for(lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip(), 60, "no job waits")
    assert len(attempts(run)) == 1


def fingerprint_is_there(run: Path) -> bool:
    return (run / "exports" / f"step-{STEPS}").is_dir()


def test_a_world_without_a_driver_dies_with_its_srun(cluster: Cluster, tiny_job: TinyJob) -> None:
    """Ranks that joined by hand: scancel, and the death of srun itself, leave nothing behind."""
    for number, victim in enumerate(("srun", "job")):
        name = f"by-hand-{number}"
        config, run = tiny_job.config(name, **settings(total_train_steps=200)), tiny_job.run(name)
        script = f"srun --mpi=pmi2 --kill-on-bad-exit=1 {sys.prefix}/bin/pekoe run {config}"
        job = cluster.sbatch(script, *TWO_NODES, cwd=tiny_job.folder, variables=tiny_job.variables)
        wait_for_step(cluster, job, run, 1)
        if victim == "job":
            cluster.run(["scancel", job])
        else:
            sruns = [process for process in cluster.processes(job) if process.name() == "srun"]
            for process in sruns:
                os.kill(process.pid, signal.SIGKILL)
        cluster.wait(job)
        assert_nothing_left(cluster, job)


def test_mpiexec_inside_the_allocation(cluster: Cluster, tiny_job: TinyJob, undisturbed: Path) -> None:
    """hydra passes no signal on: the head finds the request to stop in the run directory."""
    name = "mpiexec"
    config, run = tiny_job.config(name, **settings(**{"cluster.launcher": "mpiexec"})), tiny_job.run(name)
    job = submit(cluster, tiny_job, config, *TWO_NODES, "--no-requeue")
    wait_for_step(cluster, job, run, 2)
    cluster.run(["scancel", "--signal=USR2", "--batch", job])
    assert cluster.wait(job) == "FAILED"
    assert cluster.facts(job)["ExitCode"] == "75:0", cluster.output(job)
    assert_nothing_left(cluster, job)
    again = cluster.sbatch(
        TRAIN, *TWO_NODES, arguments=["--resume", run], cwd=tiny_job.folder, variables=tiny_job.variables
    )
    wait_for_step(cluster, again, run, 5)
    next(p for p in cluster.processes(again) if p.name().startswith("python") and "pekoe.launch.rank" in p.cmdline()
         and p.environ().get("PMI_RANK") == "1" and p.parent().name().startswith("python")).kill()  # fmt: skip
    assert cluster.wait(again) == "FAILED", cluster.output(again)
    assert error_record(run, 1)["rank"] == 1
    assert_nothing_left(cluster, again)
