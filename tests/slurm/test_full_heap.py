"""MPI starts through Slurm's PMI whatever lies in the memory of the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from virtual_cluster import Cluster

pytestmark = pytest.mark.slurm
PROGRAM = Path(__file__).with_name("full_heap_program.py")


def test_a_world_starts_from_a_heap_full_of_old_memory(cluster: Cluster) -> None:
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=pmi2", "--kill-on-bad-exit=1", "--time=1"]
    said = cluster.run([*command, sys.executable, PROGRAM, "2"], seconds=90).stdout
    assert sorted(line for line in said.splitlines() if line.startswith("rank")) == ["rank 0 of 2", "rank 1 of 2"], said
