"""Runs handed to a real Slurm cluster by `submit` and the commands of `pekoe`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyJob
from virtual_cluster import ROOT, Cluster, own_number

from pekoe.launch.run_errors import JobEndedError, RunStoppedError
from pekoe.launch.run_jobs import RunJob
from pekoe.launch.slurm import ScriptExecutor, StateWatcher, SubmittedJob
from pekoe.launch.submit import resume, submit
from pekoe.launch.submitted_jobs import jobs_of
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory

pytestmark = pytest.mark.slurm

END_SECONDS = 150.0
"""Of a tiny run; most of it is the import of torch on two cores that all nodes share."""
SMALL = {"total_train_steps": 2, "cluster.n_gpus_per_node": 1, "cluster.grace_seconds": 20.0}


def pekoe(cluster: Cluster, tiny_job: TinyJob, *arguments: object) -> str:
    command = [sys.executable, "-m", "pekoe.launch.cli", *map(str, arguments)]
    return cluster.run(command, seconds=END_SECONDS, variables=tiny_job.variables).stdout


def figures(run: RunDirectory) -> dict[str, Any]:
    """What two runs of the same job have in common."""
    lines = [json.loads(line) for line in (run.metrics / "metrics.jsonl").read_text().splitlines()]
    beats = read_heartbeats(run)
    return {
        "rewards": sorted(line["step"] for line in lines if "reward/mean" in line),
        "ranks": [(beat.heartbeat.rank, beat.heartbeat.role, beat.heartbeat.host) for beat in beats],
        "version": beats[0].heartbeat.version,
        "attempts": len(json.loads(run.run_json.read_text())["attempts"]),
        "ledger": sorted(path.name for path in run.ledger.glob("step-*.json")),
    }


def test_submitit_and_sbatch_start_the_same_job(login: Cluster, tiny_job: TinyJob) -> None:
    """Two ranks on each of two nodes. One rank on each is in test_driver.py (sbatch) and test_scancel.py (submitit)."""
    name, settings = "both", {"allocation": "hf:d2+fsdp:d2", "cluster.n_nodes": 2, "cluster.n_gpus_per_node": 2}
    values = {**SMALL, **settings, "cluster.slurm.nodelist": "n[1-2]"}
    (job,) = submit(tiny_job.config(f"{name}-submitit", **values))
    script = ROOT / "scripts" / "train.sbatch"
    result = job.result(timeout=END_SECONDS)
    other = login.sbatch(
        script, "--nodes=2", f"--ntasks-per-node={values['cluster.n_gpus_per_node']}", "--nodelist=n[1-2]",
        arguments=[tiny_job.config(f"{name}-sbatch", **values)], cwd=ROOT, variables=tiny_job.variables,
    )  # fmt: skip
    assert login.wait(other, seconds=END_SECONDS) == "COMPLETED", login.output(other)
    assert (result.code, result.outcome, result.steps, result.attempt) == (0, "done", 2, 0)
    ours, theirs = figures(job.run), figures(RunDirectory(tiny_job.run(f"{name}-sbatch")))
    assert ours == theirs
    assert {host for _, _, host in ours["ranks"]} == {"n1", "n2"}
    assert ours["version"] == 2
    assert ours["rewards"] == [1, 2]


def test_four_elements_on_one_node_at_once_do_not_collide(login: Cluster, tiny_job: TinyJob) -> None:
    config = tiny_job.config(
        "swept", **{**SMALL, "allocation": "hf:d1|fsdp:d1", "cluster.slurm.nodelist": "n3"}
    )  # fmt: skip
    jobs = submit(config, sweep={"actor.optimizer.lr": [1e-3, 2e-3]}, seeds=[1, 2])
    login.wait_for(lambda: all(job.run.heartbeats.is_dir() for job in jobs), END_SECONDS, "four elements at once")
    assert "4 RUNNING" in pekoe(login, tiny_job, "status", tiny_job.folder / "runs" / "test" / "sweeps" / "swept")
    results = [RunJob.of(job.run.path).result(timeout=END_SECONDS) for job in jobs]
    assert [result.steps for result in results] == [2, 2, 2, 2]
    assert len({result.run for result in results}) == 4
    main = jobs[0].job_id.partition("_")[0]
    assert [job.job_id for job in jobs] == [f"{main}_{index}" for index in range(4)]
    for job, seed in zip(jobs, (1, 2, 1, 2), strict=True):
        assert {beat.heartbeat.host for beat in read_heartbeats(job.run)} == {"n3"}
        assert f"seed: {seed}\n" in job.run.config.read_text()
        assert not list(job.run.errors.glob("*")), job.logs()


def test_a_run_is_cancelled_continued_and_watched_by_its_directory(login: Cluster, tiny_job: TinyJob) -> None:
    values = {
        **SMALL,
        "cluster.n_gpus_per_node": 2,
        "total_train_steps": 5000,
        "total_train_epochs": 500,
        "recover.freq_steps": 1,
    }
    (job,) = submit(tiny_job.config("stopped", **values))
    run, first = job.run, job.job_id
    login.wait_for(lambda: list(run.checkpoints.glob("step-*")), END_SECONDS, "a checkpoint")
    said = pekoe(login, tiny_job, "status", run.path)
    assert f"job {job.job_id} (submit): RUNNING on n" in said
    assert f", job {job.job_id}" in said
    assert "attempt 0 began" in said
    assert f"{job.job_id} stopped" in pekoe(login, tiny_job, "cancel", run.path)
    with pytest.raises(RunStoppedError, match=f"pekoe resume {run.path}"):
        RunJob.of(run).result(timeout=90)
    assert login.wait(job.job_id) == "FAILED"
    assert login.facts(job.job_id)["ExitCode"] == "75:0"
    steps = max(int(path.stem.removeprefix("step-")) for path in run.ledger.glob("step-*.json"))
    with pytest.raises(AssertionError, match="no job of it waits or runs"):
        pekoe(login, tiny_job, "cancel", run.path)

    again = resume(run, [f"total_train_steps={steps + 2}"])
    followed = pekoe(login, tiny_job, "logs", run.path, "-f", "--lines", 5)
    assert f"step {steps + 2}/{steps + 2}" in followed, followed
    result = again.result(timeout=90)
    assert (result.attempt, result.steps, result.outcome) == (1, steps + 2, "done")
    assert [entry.job_id for entry in jobs_of(run)] == [first, again.job_id]
    assert "rank 1 INFO" in pekoe(login, tiny_job, "logs", run.path, "--attempt", 0, "--rank", 1)
    assert f"step {steps}/5000" in "".join(path.read_text() for path in again.logs())


def test_a_handle_follows_a_chain_of_jobs_to_the_end_of_the_run(login: Cluster, tiny_job: TinyJob) -> None:
    values = {**SMALL, "cluster.n_gpus_per_node": 2, "cluster.continue_by": "chain", "recover.freq_steps": 1}
    (job,) = submit(tiny_job.config("chained", **{**values, "total_train_steps": 100, "total_train_epochs": 500}))
    run = job.run
    login.wait_for(lambda: list(run.checkpoints.glob("step-*")), END_SECONDS, "a checkpoint")
    assert [entry.why for entry in jobs_of(run)] == ["submit", "chain"]
    assert (RunJob.of(run).job_id, job.state) == (job.job_id, "RUNNING")
    login.run(["scancel", "--signal=USR2", "--batch", job.job_id])
    result = job.result(timeout=END_SECONDS)
    assert (result.attempt, result.outcome, result.steps) == (1, "done", 100)
    last = RunJob.of(run)
    assert [entry.job_id for entry in jobs_of(run)] == [job.job_id, last.job_id]
    assert last.job_id != job.job_id
    assert login.wait(last.job_id) == "COMPLETED"
    assert not login.run(["squeue", "--noheader"]).stdout.strip(), "no further job waits"


def sleeping(folder: Path, seconds: float, *flags: str, function: Callable[..., Any] = time.sleep) -> Any:
    """A job of submitit that runs a function under our script."""

    def script(num_elements: int | None) -> str:
        lines = [f"#SBATCH {flag}" for flag in ("--ntasks=1", f"--output={folder}/%j_0_log.out", *flags)]
        command = f"exec env SUBMITIT_EXECUTOR=slurm {sys.executable} -u -m submitit.core._submit {folder}"
        return "\n".join(["#!/bin/bash", *lines, command, ""])

    return ScriptExecutor(folder, script).submit(function, seconds)


def test_the_ways_in_which_a_job_can_end_are_told_apart(login: Cluster, tmp_path: Path) -> None:
    """Without a result there is an error, and it names the state. TIMEOUT takes the minute that is Slurm's least."""
    late = sleeping(tmp_path, 300, "--time=1", "--nodelist=n1")
    cancelled = sleeping(tmp_path, 300, "--nodelist=n1")
    failed = sleeping(tmp_path, 3, "--nodelist=n1", function=os._exit)
    lost = sleeping(tmp_path, 300, "--nodelist=n4", "--no-requeue")
    preempted = sleeping(tmp_path, 300, "--partition=low", "--nodelist=n2", "--no-requeue")
    requeued = sleeping(tmp_path, 300, "--partition=low", "--nodelist=n3", "--requeue")
    jobs = {"CANCELLED": cancelled, "FAILED": failed, "NODE_FAIL": lost, "PREEMPTED": preempted, "TIMEOUT": late}
    for job in (late, cancelled, lost, preempted, requeued):
        login.wait(job.job_id, {"RUNNING"})
    assert not late.done(force_check=True)
    login.run(["scancel", cancelled.job_id])
    login.scontrol("update", "nodename=n4", "state=down", "reason=test")
    above = [login.sbatch("sleep 40", "--partition=high", f"--nodelist={node}", "--cpus-per-task=4")
             for node in ("n2", "n3")]  # fmt: skip
    login.wait(requeued.job_id, {"PENDING"})
    assert not requeued.done(force_check=True), "it was put back into the queue: that is no end"
    for state, job in jobs.items():
        error = job.exception()
        assert isinstance(error, JobEndedError), (state, error)
        assert error.state == state
        assert job.job_id in str(error)
        with pytest.raises(JobEndedError, match=f"ended as {state} without a result"):
            SubmittedJob(tmp_path, job.job_id).result()
    assert not requeued.done(force_check=True)
    login.run(["scancel", requeued.job_id, *above])


@pytest.fixture
def cramped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of one node that holds jobs to their memory."""
    monkeypatch.setenv("PEKOE_SLURM_CGROUP", "1")
    monkeypatch.setenv("PEKOE_SLURM_NODES", "1")
    with own_number() as number:
        made = Cluster(number, tmp_path)
        made.down()
        made.up()
        try:
            for name, value in made.environment.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr(SubmittedJob, "watcher", StateWatcher(delay_s=1))
            yield made
        finally:
            made.down()


def test_too_little_memory_is_a_state_of_its_own(cluster: Cluster, cramped: Cluster) -> None:
    job = sleeping(cramped.folder, 400 << 20, "--mem=100M", function=bytearray)
    error = job.exception()
    assert isinstance(error, JobEndedError), error
    assert error.state == "OUT_OF_MEMORY"
    assert "raise cluster.slurm.mem" in str(error)
