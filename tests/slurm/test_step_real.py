"""The argument lists of `step_command` and the text of `batch_script` on a real cluster: one world, ranks in place."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from virtual_cluster import Cluster

from pekoe.launch.allocation import parse
from pekoe.launch.batch_script import BatchJob, batch_script
from pekoe.pipeline.config.load import from_yaml_text

pytestmark = pytest.mark.slurm

DRIVER = Path(__file__).with_name("step_driver.py")
OPENMPI = "cluster.slurm.mpi_library=/usr/lib/x86_64-linux-gnu/libmpi.so.40"
MPIRUN = ["cluster.launcher=mpiexec", OPENMPI, "cluster.slurm.mpiexec=[mpirun,--allow-run-as-root]"]
TWO_NODES = ["cluster.device=cuda", "cluster.n_nodes=2", "cluster.n_gpus_per_node=2", "cluster.slurm.cpus_per_task=1"]
THREE = ("-N3", "--ntasks-per-node=2", "--cpus-per-task=1", "--gres=gpu:2")
SPLIT, UNEVEN = "hf:d2+fsdp:d2", "hf:d1+fsdp:d2"


def start(
    cluster: Cluster, *overrides: str, allocation: str = SPLIT, nodes: str = "-", argument: str = "",
    job: tuple[str, ...] = THREE, inside: tuple[str, ...] = (), check: bool = True,
) -> str:  # fmt: skip
    """What the driver and its world print, in an allocation of their own."""
    words = [sys.executable, str(DRIVER), allocation, nodes, argument, *TWO_NODES, *overrides]
    return cluster.run(["salloc", "--quiet", *job, *inside, *words], check=check).stdout


def worlds(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def hosts(output: str) -> list[str]:
    """The host of each rank of the one world there is."""
    (world,) = worlds(output)
    assert [seen["rank"] for seen in world["ranks"]] == list(range(len(world["ranks"])))
    return [seen["host"] for seen in world["ranks"]]


@pytest.mark.parametrize(
    ("overrides", "library"),
    [
        ([], "MPICH"),
        ([OPENMPI], "Open MPI"),
        (["cluster.launcher=mpiexec"], "MPICH"),
        (MPIRUN, "Open MPI"),
    ],
    ids=["srun-pmi2", "srun-pmix", "hydra", "mpirun"],
)
def test_one_world_over_two_nodes(cluster: Cluster, overrides: list[str], library: str) -> None:
    first = start(cluster, *overrides, allocation=SPLIT)
    assert hosts(first) == ["n1", "n1", "n2", "n2"]
    assert library in worlds(first)[0]["library"]
    assert hosts(start(cluster, *overrides, allocation=UNEVEN, nodes="n2,n3")) == ["n2", "n2", "n3"]


def test_the_variables_of_the_site_reach_ranks_and_each_sees_all_devices_of_its_node(cluster: Cluster) -> None:
    (world,) = worlds(start(cluster, "cluster.slurm.environment={PROBE_NOTE: two words}"))
    assert {(seen["devices"], seen["note"]) for seen in world["ranks"]} == {("0,1", "two words")}


@pytest.mark.parametrize("mpi", [[], [OPENMPI]], ids=["pmi2", "pmix"])
def test_a_heterogeneous_job_is_one_world_with_the_trainers_first(cluster: Cluster, mpi: list[str]) -> None:
    own = ["cluster.n_nodes=1", "cluster.rollout_nodes.n_nodes=2", "cluster.rollout_nodes.gres="]
    both = ("-N1", "--ntasks-per-node=2", "--gres=gpu:2", ":", "-N2", "--ntasks-per-node=2")
    output = start(cluster, *own, *mpi, allocation="hf:d4+fsdp:d2", job=both)
    trainers, rollouts = ["n1", "n1"], ["n2", "n2", "n3", "n3"]
    assert hosts(output) == [*trainers, *rollouts]
    devices = [seen["devices"] for seen in worlds(output)[0]["ranks"]]
    assert devices == ["0,1", "0,1", None, None, None, None]


@pytest.mark.parametrize("mpi", [[], [OPENMPI]], ids=["pmi2", "pmix"])
def test_a_killed_rank_ends_the_step_at_once(cluster: Cluster, mpi: list[str]) -> None:
    output = start(cluster, *mpi, argument="die", check=False)
    (code, seconds) = re.findall(r"code (\d+) after ([\d.]+) s", output)[0]
    assert int(code) != 0
    assert float(seconds) < 45


def test_a_step_starts_from_a_shell_that_is_a_step_itself(cluster: Cluster) -> None:
    """`salloc`, then `srun --pty bash`: that step holds the cores of the job."""
    shell = ("srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--mpi=none")
    assert hosts(start(cluster, nodes="n1,n2", inside=shell)) == ["n1", "n1", "n2", "n2"]


def script(cluster: Cluster, name: str, *overrides: str, allocation: str = SPLIT, argument: str = "") -> str:
    words = (allocation, "-", argument, *TWO_NODES, *overrides)
    job = BatchJob(name, (sys.executable, str(DRIVER), *words), str(cluster.folder / "job-%A-%a.out"))
    return batch_script(job, from_yaml_text("", [*TWO_NODES, *overrides]), parse(allocation))


@pytest.mark.parametrize("export", ["ALL", "NONE", "PATH"])
def test_a_job_needs_nothing_of_its_submitter(cluster: Cluster, export: str) -> None:
    text = script(cluster, "grpo", "cluster.slurm.environment={PROBE_NOTE: here}", "cluster.time_limit='5'")
    job = cluster.sbatch(text, f"--export={export}")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert hosts(cluster.output(job)) == ["n1", "n1", "n2", "n2"]
    assert '"note": "here"' in cluster.output(job)


def test_a_heterogeneous_script_starts_one_world(cluster: Cluster) -> None:
    own = ["cluster.n_nodes=1", "cluster.rollout_nodes.n_nodes=1", "cluster.rollout_nodes.partition=low"]
    job = cluster.sbatch(script(cluster, "both", *own))
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert hosts(cluster.output(job)) == ["n1", "n1", "n2", "n2"]


def test_a_failed_world_is_a_failed_job(cluster: Cluster) -> None:
    job = cluster.sbatch(script(cluster, "dead", argument="die"))
    assert cluster.wait(job) == "FAILED", cluster.output(job)
    assert cluster.facts(job)["ExitCode"] != "0:0"


def test_a_lost_node_ends_the_step_and_not_the_allocation(cluster: Cluster) -> None:
    """`--no-kill` keeps what is left of the allocation for the next start; a world without a rank is no world."""
    keep = ["cluster.spare_nodes=1", "cluster.restart_in_place=1"]
    words = (SPLIT, "n2,n3", "wait", *TWO_NODES, *keep)
    line = f"{sys.executable} {DRIVER} {' '.join(words)}; squeue -h -j $SLURM_JOB_ID -o 'left %N'"
    job = BatchJob("spare", ("bash", "-c", line), str(cluster.folder / "job-%A-%a.out"))
    number = cluster.sbatch(batch_script(job, from_yaml_text("", [*TWO_NODES, *keep]), parse(SPLIT)))
    cluster.wait_for(lambda: worlds(cluster.output(number)), 30, "the world is there")
    cluster.scontrol("update", "nodename=n3", "state=down", "reason=test")
    cluster.wait_for(lambda: "left" in cluster.output(number), 30, "the step has ended")
    assert "left n[1-2]" in cluster.output(number)
    assert not re.search("code 0 after", cluster.output(number))
