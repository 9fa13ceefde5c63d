"""`pekoe doctor` on a real Slurm cluster: all well over two nodes, and what it says of what is wrong there."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from virtual_cluster import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

from doctor_report import Examined

pytestmark = pytest.mark.slurm

PROGRAM = (
    "import sys; from pekoe.launch.doctor.doctor import diagnose_cluster; "
    "text, code = diagnose_cluster(sys.argv[1] or None, as_json=True); print(text); sys.exit(code)"
)
SECONDS = 90.0
"""A doctor that takes longer than this is broken itself."""


def write_site(folder: Path, name: str, slurm: dict[str, Any] | None = None, **settings: Any) -> str:
    values = {"device": "cpu", "n_gpus_per_node": 2, "fileroot": str(folder / "runs"), **settings}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"cluster": {**values, "slurm": {"partition": "debug", **(slurm or {})}}}))
    return str(path)


def examine(cluster: Cluster, site: str) -> Examined:
    began = time.monotonic()
    done = cluster.run([sys.executable, "-c", PROGRAM, site], SECONDS + 20, check=False)
    assert time.monotonic() - began < SECONDS
    return Examined(done.stdout, done.returncode)


def test_all_is_well_on_two_nodes_and_nothing_stays(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    found = examine(cluster, write_site(tmp_path, "good"))
    assert found.problems == [], found.problems
    assert found.code == 0
    met = found.find("world", "4 ranks on 2 nodes by a job of its own (pmi2): one world after")
    assert "--mpi=pmi2" in met["text"]
    found.find("world", "rank 0: n1/0, rank 1: n1/1, rank 2: n2/0, rank 3: n2/1")
    found.find("mpi", "srun --mpi=pmi2 is offered")
    found.find("slurm", "arrays have indices below 1,001")
    found.find("slurm", "accounting works (sacct)")
    found.find("versions", "the same on n1, n2")
    found.find("shared filesystem", "between n1 and n2")
    found.find("shared filesystem", "rename is atomic")
    found.find("shared filesystem", "flock and fcntl locks exclude")
    found.find("network", "n2 -> n1: by eth0 (10.77.")
    found.find("nodes", "n2: ")
    assert list((tmp_path / "runs").iterdir()) == []
    cluster.wait_for(
        lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip(), 20, "the job of the trial is over"
    )


def test_preemption_and_devices_of_a_site(cluster: Cluster, tmp_path: Path) -> None:
    """Generic resources are device files without a device: Slurm gives them, torch sees none."""
    site = write_site(tmp_path, "gpus", {"partition": "low", "gres": "gpu:h100"}, device="cuda")
    found = examine(cluster, site)
    preempted = found.find("slurm", "partition low: preempted by REQUEUE")
    assert "USR2 to the driver, the end 20 s later" in preempted["text"]
    assert "cluster.grace_seconds=15" in preempted["next_step"]
    found.find("slurm", "4 nodes have gres gpu:h100:1")
    found.find("devices", "CUDA_VISIBLE_DEVICES gives rank 0: n1/0, rank 1: n1/1")
    assert found.find("devices", "n1: cluster.device is cuda, but torch sees no cuda device")["severity"] == "problem"
    found.find("versions", "torch is a build for cpu, but cluster.device is cuda")


@pytest.mark.parametrize(
    ("slurm", "area", "text", "step"),
    [
        ({"mpi": "none"}, "world", "4 ranks found no world", "pmi2 for MPICH"),
        ({"mpi": "pmix"}, "world", "before a report", "pmi2 for MPICH"),
        (
            {"mpi": "openmpi"},
            "mpi",
            "needs srun --mpi=openmpi, which this cluster has not",
            "cluster.launcher: mpiexec",
        ),
        ({"partition": "nosuch"}, "slurm", "partition 'nosuch' is not there", "debug, high, low"),
        ({"gres": "gpu:a100"}, "slurm", "no node of debug has gres gpu:a100:1", "gpu:h100:2"),
        ({"constraint": "water"}, "world", "Slurm gave no job", "--constraint=water"),
    ],
)
def test_what_does_not_fit_this_cluster(
    cluster: Cluster, tmp_path: Path, slurm: dict[str, Any], area: str, text: str, step: str
) -> None:
    found = examine(cluster, write_site(tmp_path, "wrong", slurm))
    said = found.find(area, text)
    assert said["severity"] == "problem"
    assert step in said["next_step"]
    assert found.code == 1


def test_a_fileroot_of_each_node_alone(cluster: Cluster, tmp_path: Path) -> None:
    found = examine(cluster, write_site(tmp_path, "local", fileroot="/dev/shm"))
    said = found.find("shared filesystem", "a folder made on n1 was not seen on n2")
    assert "cluster.fileroot" in said["next_step"]
    assert found.code == 1


def test_a_full_queue_is_no_problem_and_says_how_to_go_on(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch("sleep 90", "--nodes=4", "--exclusive")
    cluster.wait(job, {"RUNNING"})
    found = examine(cluster, write_site(tmp_path, "full"))
    said = found.find("world", "no nodes within 15 s; the queue is full")
    assert said["severity"] == "note"
    assert said["next_step"].startswith(
        "salloc --nodes=2 --ntasks-per-node=2 --partition=debug, then in it: pekoe doctor"
    )
    assert found.code == 0
    assert cluster.run(["squeue", "--noheader", "--format=%i"]).stdout.split() == [job]


def test_inside_an_allocation_no_other_job_is_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    site = write_site(tmp_path, "inside")
    command = f"{sys.executable} -c '{PROGRAM}' {site} > {tmp_path}/said"
    job = cluster.sbatch(command, "--nodes=2", "--ntasks-per-node=2")
    assert cluster.wait(job, seconds=SECONDS) == "COMPLETED", cluster.output(job)
    found = Examined((tmp_path / "said").read_text(), 0)
    found.find("world", "4 ranks on 2 nodes by this job (pmi2)")
    assert found.problems == []


def test_the_mpiexec_of_the_wheel_inside_a_job(cluster: Cluster, tmp_path: Path) -> None:
    found = examine(cluster, write_site(tmp_path, "hydra", launcher="mpiexec"))
    assert found.problems == [], found.problems
    found.find("world", "4 ranks on 2 nodes by a job of its own (mpich): one world")
    found.find("mpi", "is of the kind hydra")


def test_a_second_mpi_library(cluster: Cluster, tmp_path: Path) -> None:
    """Open MPI of the distribution over PMIx, in place of the wheel's MPICH."""
    library = next(Path("/usr/lib").glob("*/libmpi.so.40"))
    found = examine(cluster, write_site(tmp_path, "openmpi", {"mpi_library": str(library)}))
    assert found.problems == [], found.problems
    assert "--mpi=pmix" in found.find("world", "4 ranks on 2 nodes by a job of its own (pmix): one world")["text"]
    found.find("mpi", "mpi4py loads Open MPI")
