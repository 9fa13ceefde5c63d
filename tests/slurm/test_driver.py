"""The driver of a job on a real cluster: from the start to a good end, a death, a cancelled job."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyJob
from virtual_cluster import ROOT, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]
TRAIN = ROOT / "scripts" / "train.sbatch"


def start(cluster: Cluster, tiny_job: TinyJob, config: Path, *flags: str) -> str:
    """`sbatch FLAGS scripts/train.sbatch CONFIG`."""
    return cluster.sbatch(TRAIN, *flags, arguments=[config], cwd=tiny_job.folder, variables=tiny_job.variables)


def test_two_nodes(cluster: Cluster, tiny_job: TinyJob) -> None:
    config = tiny_job.config("two", **{"cluster.n_nodes": 2, "cluster.n_gpus_per_node": 1, "cluster.slurm.gres": ""})
    job = start(cluster, tiny_job, config, "--nodes=2", "--ntasks-per-node=1")
    state = cluster.wait(job, seconds=60)
    print(cluster.output(job))
    assert state == "COMPLETED"
