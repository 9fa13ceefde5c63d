"""A job that is submitted from inside another one: nothing of the outer job's identity, all of the site's settings."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pekoe.launch import environment
from pekoe.launch.slurm_commands import without_identity

RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recorded_environments.json").read_text())
SITE = {
    "SLURM_CONF": "/x/slurm.conf", "SLURM_CLUSTERS": "alpha,beta", "SLURM_TIME_FORMAT": "relative", "PATH": "/bin",
    "LD_LIBRARY_PATH": "/opt/mpi/lib", "MODULEPATH": "/opt/modules",
}  # fmt: skip
KEPT = set(SITE) | {"SLURM_CLUSTER_NAME"}


@pytest.mark.parametrize("name", RECORDED)
def test_nothing_of_a_real_job_is_left_and_all_of_the_site_is(name: str) -> None:
    inner = without_identity({**RECORDED[name]["environ"], **SITE})
    assert set(inner) <= KEPT
    assert {key: inner[key] for key in SITE} == SITE
    facts = environment.read(inner, "h")
    assert (facts.launcher, facts.job_id, facts.in_allocation, facts.array_task) == ("none", None, False, None)


def test_devices_that_a_user_chose_outside_of_jobs_stay() -> None:
    assert without_identity({"CUDA_VISIBLE_DEVICES": "1"}) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_the_child_of_an_array_task_has_ids_of_its_own(tmp_path: Path) -> None:
    """Against a `sbatch` that starts the job with the caller's environment and the new job's ids, as Slurm does."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\nexport SLURM_JOB_ID=99 SLURM_JOB_NODELIST=n7\nexec env\n")
    sbatch.chmod(0o755)
    outer = {
        "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "4", "SLURM_CONF": "/x/slurm.conf",
        "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_PER_TASK": "4",
        "PATH": os.environ["PATH"],
    }  # fmt: skip
    said = subprocess.run([sbatch], env=without_identity(outer), capture_output=True, text=True, check=True, timeout=90)
    child = dict(line.split("=", 1) for line in said.stdout.splitlines() if "=" in line)
    facts = environment.read(child, "h")
    assert (facts.job_id, facts.array_task, facts.job_nodes, facts.in_allocation) == ("99", None, ("n7",), True)
    assert child["SLURM_CONF"] == "/x/slurm.conf"
    assert not {"SLURM_NTASKS", "SLURM_MEM_PER_CPU", "SLURM_CPUS_PER_TASK", "SLURM_STEP_ID"} & set(child)
