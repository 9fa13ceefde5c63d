"""What real launchers make of a rank on the cluster: MPI's numbers are the environment's, whoever started the world."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from virtual_cluster import ROOT, Cluster

pytestmark = pytest.mark.slurm

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"
OPEN_MPI = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")
PLAN = f"{PYTHON} {HERE / 'rank_plan_program.py'}"
WORLD = "vllm:d2+fsdp:d2"


def plans(cluster: Cluster, script: str, *flags: str, seconds: float = 90.0) -> list[dict[str, Any]]:
    job = cluster.sbatch(f"set -e\n{script}", "--time=3", *flags)
    state = cluster.wait(job, seconds=seconds)
    said = cluster.output(job)
    assert state == "COMPLETED", said
    return [json.loads(line[5:]) for line in said.splitlines() if line.startswith("plan ")]


def check(told: list[dict[str, Any]], nodes: list[str], launcher: str) -> None:
    """`nodes`: of each rank, by rank."""
    size = len(nodes)
    assert [one["mpi"] for one in told] == [[rank, size] for rank in range(size)]
    for rank, one in enumerate(told):
        before = nodes[:rank].count(nodes[rank])
        assert one["facts"] == [rank, size]
        assert one["host"] == [nodes[rank], nodes[rank]]
        assert one["local"] == [before, nodes.count(nodes[rank])]
        assert one["launcher"] == launcher
        assert (one["interface"], one["gloo"]) == ("eth0", "eth0")
        assert one["address"].split(".")[-1] == nodes[rank][1:]
        assert one["nodes"] == sorted(set(nodes))
    trainers = [one["torch"] for one in told if one["torch"]["RANK"] is not None]
    assert [one["RANK"] for one in trainers] == ["0", "1"]
    assert {one["WORLD_SIZE"] for one in trainers} == {"2"}
    assert all(one["ports"] for one in told[2:])
    for node in set(nodes):
        mine = [one for rank, one in enumerate(told) if nodes[rank] == node]
        devices = [one["device"][0] for one in mine if one["device"]]
        ports = [one["ports"][0] for one in mine if one["ports"]]
        assert len(set(devices)) == len(devices)
        assert len(set(ports)) == len(ports)
        assert len({one["cache"] for one in mine}) == 1


TWO_BY_TWO = ["n1", "n1", "n2", "n2"]


def srun(mpi: str, flags: str = "") -> str:
    return f"srun --mpi={mpi} --kill-on-bad-exit=1 {flags} {PLAN} {WORLD} cuda"


@pytest.mark.parametrize(
    ("how", "launcher"),
    [
        (srun("pmi2"), "pmi2"),
        (f"MPI4PY_LIBMPI={OPEN_MPI} {srun('pmix')}", "pmix"),
        (f"{MPIEXEC} -n 4 -ppn 2 {PLAN} {WORLD} cuda", "mpich"),
        (
            f"mpirun --allow-run-as-root --oversubscribe -n 4 --map-by ppr:2:node "
            f"-x MPI4PY_LIBMPI={OPEN_MPI} {PLAN} {WORLD} cuda",
            "openmpi",
        ),
    ],
    ids=["srun-pmi2", "srun-pmix", "mpiexec-mpich", "mpirun-openmpi"],
)
def test_ranks_of_a_world(cluster: Cluster, how: str, launcher: str) -> None:
    told = plans(cluster, how, "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:h100:2")
    check(told, TWO_BY_TWO, launcher)
    assert [one["device"] for one in told] == [["0", 0], ["1", 1], ["0", 0], ["1", 1]]


def test_a_step_is_smaller_than_its_job(cluster: Cluster) -> None:
    how = f"srun --mpi=pmi2 --nodes=2 --ntasks=3 --ntasks-per-node=2 {PLAN} vllm:d1+fsdp:d2 cpu"
    told = plans(cluster, how, "--nodes=3", "--ntasks-per-node=2")
    assert [one["mpi"] for one in told] == [one["facts"] for one in told] == [[0, 3], [1, 3], [2, 3]]
    assert all(one["nodes"] == ["n1", "n2", "n3"] for one in told)


def test_devices_that_slurm_gave_to_each_task(cluster: Cluster) -> None:
    told = plans(cluster, srun("pmi2"), "--nodes=2", "--ntasks-per-node=2", "--ntasks=4", "--gpus-per-task=1")
    check(told, TWO_BY_TWO, "pmi2")
    assert [one["device"] for one in told] == [["0", 0], ["1", 0], ["0", 0], ["1", 0]]


@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
def test_both_components_of_a_heterogeneous_job_are_one_world(cluster: Cluster, mpi: str) -> None:
    library = f"MPI4PY_LIBMPI={OPEN_MPI}" if mpi == "pmix" else ""
    script = (
        "#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=2 --gres=gpu:h100:2\n#SBATCH hetjob\n"
        f"#SBATCH --nodes=2 --ntasks-per-node=1\n{library} {srun(mpi, '--het-group=0,1')}"
    )
    job = cluster.sbatch(script, "--time=3")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    told = [json.loads(line[5:]) for line in cluster.output(job).splitlines() if line.startswith("plan ")]
    check(told, ["n1", "n1", "n2", "n3"], mpi)
    assert [one["node"] for one in told] == [0, 0, 1, 2]
    assert [one["device"] for one in told] == [["0", 0], ["1", 1], None, None]


def test_array_tasks_share_no_cache(cluster: Cluster) -> None:
    told = plans(
        cluster, f"srun --mpi=pmi2 {PLAN} fsdp:d2 cpu", "--nodes=1", "--ntasks-per-node=2", "--array=0-1"
    )  # fmt: skip
    assert len(told) == 4
    caches = {one["cache"] for one in told}
    assert len(caches) == 2
    assert {Path(cache).parent.name.rpartition("_")[2] for cache in caches} == {"0", "1"}


def test_trainers_on_two_nodes_meet_over_the_chosen_interface(cluster: Cluster) -> None:
    step = f"srun --mpi=pmi2 --kill-on-bad-exit=1 {PYTHON} {HERE / 'gloo_program.py'}"
    job = cluster.sbatch(step, "--nodes=2", "--ntasks-per-node=1")
    assert cluster.wait(job, seconds=120) == "COMPLETED", cluster.output(job)
    head = f"10.77.{cluster.number}.1"
    assert [line for line in cluster.output(job).splitlines() if line.startswith("sum")] == [
        f"sum 3 over eth0 at {head}"
    ] * 2


def test_a_packed_environment_is_unpacked_once_on_each_node(cluster: Cluster, tmp_path: Path) -> None:
    venv.create(tmp_path / "packed", symlinks=True)
    archive = tmp_path / "packed.tar"
    subprocess.run(["tar", "-cf", archive, "-C", tmp_path, "packed"], check=True)
    wrapper = f"{PYTHON} -I -S {ROOT / 'launch' / 'packed_environment.py'} {archive} --seconds 60"
    show = tmp_path / "show.py"
    show.write_text(
        "import os, sys\n"
        "line = f\"inside {os.environ['SLURMD_NODENAME']} {os.environ['PMI_RANK']} {sys.prefix}\\n\"\n"
        "os.write(1, line.encode())  # one write: tasks share the output\n"
    )
    disk = f"{cluster.home}/tmp-$SLURMD_NODENAME"
    job = cluster.sbatch(
        f"srun --mpi=pmi2 bash -c 'SLURM_TMPDIR={disk} exec {wrapper} -- python {show}'",
        "--nodes=2", "--ntasks-per-node=2",
    )  # fmt: skip
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    said = cluster.output(job).splitlines()
    inside = sorted(line.split() for line in said if line.startswith("inside"))
    assert [words[1:3] for words in inside] == [["n1", "0"], ["n1", "1"], ["n2", "2"], ["n2", "3"]]
    assert all(words[3].startswith(f"{cluster.home}/tmp-{words[1]}/") for words in inside)
    assert sum("unpacked in" in line for line in said) == 2


def test_the_child_of_an_array_task_has_ids_of_its_own(cluster: Cluster) -> None:
    code = (
        "import os, subprocess; from pekoe.launch.slurm_commands import without_identity; "
        "subprocess.run(['sbatch', '--wait', '--output=child.out', '--wrap', 'env | sort'], "
        "env=without_identity(os.environ), check=True)"
    )
    job = cluster.sbatch(f'{PYTHON} -c "{code}"', "--array=3", "--mem-per-cpu=300", "--gres=gpu:h100:1", "--nodes=1")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    child = dict(line.split("=", 1) for line in (cluster.folder / "child.out").read_text().splitlines() if "=" in line)
    assert child["SLURM_JOB_ID"] not in (job, f"{job}_3")
    assert child["SLURM_CONF"] == str(cluster.home / "etc" / "slurm.conf")
    assert not {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "CUDA_VISIBLE_DEVICES"} & set(child)
    assert child["SLURM_MEM_PER_CPU"] == "512"
