"""What tests of the driver share: jobs on two nodes, their ranks, how far they are, and how they end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from virtual_cluster import ROOT, Cluster

sys.path.insert(0, str(ROOT / "scripts" / "bench"))

TRAIN = ROOT / "scripts" / "train.sbatch"
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
STEPS = 12
START_SECONDS = 150.0
"""Until the first step of a job, on a busy machine."""


def settings(reward_seconds: float = 0.05, **more: Any) -> dict[str, Any]:
    """Of a run whose every step takes about a second, and which has one right result, bit for bit."""
    return {
        "cluster.n_nodes": 2, "cluster.n_gpus_per_node": 1, "reward.name": "slow_reward:slow_digit_share",
        "reward.args": {"seconds": reward_seconds},
        "rollout.max_head_offpolicyness": 0, "rollout.deterministic": True, "rollout.shard_max_groups": 2,
        "total_train_steps": STEPS, "total_train_epochs": 10, "recover.freq_steps": 2, "seed": 5, **more,
    }  # fmt: skip


def ledger_step(run: Path) -> int:
    """The newest step in the ledger; 0 before the first."""
    return max((int(path.stem[5:]) for path in (run / "ledger").glob("step-*.json")), default=0)


def newest_checkpoint(run: Path) -> int:
    return max(
        (int(path.name[5:]) for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit()), default=0
    )


def wait_for_step(cluster: Cluster, job: str, run: Path, step: int) -> None:
    """Until the ledger has the step; a job that ends before is an error."""
    living = ("RUNNING", "PENDING", "CONFIGURING")
    come = lambda: ledger_step(run) >= step or cluster.state(job) not in living  # noqa: E731
    cluster.wait_for(come, START_SECONDS, f"step {step} of {run}")
    assert ledger_step(run) >= step, f"job {job} is {cluster.state(job)}\n{cluster.output(job)}"


def attempts(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "run.json").read_text())["attempts"]
    return found


def error_record(run: Path, attempt: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "errors" / f"attempt-{attempt}.json").read_text())
    return found


def rank_processes(cluster: Cluster, job: str, rank: int) -> list[psutil.Process]:
    """Supervisor and rank, in that order."""
    found = []
    for process in cluster.processes(job):
        try:
            environ, line = process.environ(), process.cmdline()
        except psutil.Error:
            continue
        if environ.get("PMI_RANK") == str(rank) and "pekoe.launch.rank" in line and "python" in Path(line[0]).name:
            found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def start_now(cluster: Cluster, job: str) -> None:
    """A requeued job waits two minutes; not here."""
    cluster.wait_for(lambda: cluster.state(job) == "PENDING", 120, f"job {job} back in the queue")
    end = time.monotonic() + 100
    while cluster.state(job) == "PENDING":
        assert time.monotonic() < end, f"job {job} does not start: {cluster.facts(job).get('Reason')}"
        time.sleep(1.0)
        cluster.run(["scontrol", "update", f"jobid={job}", "starttime=now"], check=False)


def assert_nothing_left(cluster: Cluster, job: str, seconds: float = 60.0) -> None:
    cluster.wait_for(lambda: not cluster.processes(job), seconds, f"no process of job {job}")


def fingerprint(run: Path) -> str:
    """Of the exported weights."""
    from chaos_verdict import fingerprint as of_weights

    return str(of_weights(run))


def consumed(run: Path) -> list[Any]:
    """The sequence of groups that were trained on."""
    from chaos_verdict import sequence

    return list(sequence(run))
