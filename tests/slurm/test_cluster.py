"""The cluster that the other tests stand on."""

from __future__ import annotations

import pytest
from virtual_cluster import Cluster

pytestmark = pytest.mark.slurm


def test_a_step_runs_on_every_node_and_the_job_leaves_nothing(cluster: Cluster) -> None:
    job = cluster.sbatch("srun --ntasks-per-node=1 hostname | sort", "--nodes=4")
    assert cluster.wait(job) == "COMPLETED"
    assert cluster.output(job).splitlines()[1:] == ["n1", "n2", "n3", "n4"]
    assert cluster.processes(job) == []


def test_processes_of_a_job_are_seen_and_a_node_that_was_down_is_idle_again(cluster: Cluster) -> None:
    job = cluster.sbatch("srun sleep 60", "--nodes=2", "--no-requeue")
    cluster.wait(job, {"RUNNING"})
    cluster.wait_for(lambda: sum(p.name() == "sleep" for p in cluster.processes(job)) == 2, 10, "two tasks")
    cluster.scontrol("update", "nodename=n4", "state=down", "reason=test")
    cluster.clear()
    assert cluster.processes(job) == []
    cluster.wait_for(
        lambda: cluster.run(["sinfo", "-h", "-p", "debug", "-o", "%T"]).stdout.split() == ["idle"], 20, "idle"
    )
