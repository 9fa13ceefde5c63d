"""A full run with the distribution's Open MPI in place of the wheel's MPICH: by srun and PMIx, by its own mpirun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TinyJob
from driver_jobs import START_SECONDS, assert_nothing_left, ledger_step, settings
from virtual_cluster import Cluster

from pekoe.launch.run_errors import RunFailedError
from pekoe.launch.submit import submit
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")
"""Debian's; the cluster's script installs it."""


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("pmix", {"cluster.launcher": "srun"}),
        (
            "mpirun",
            {"cluster.launcher": "mpiexec", "cluster.slurm.mpiexec": ["/usr/bin/mpirun", "--allow-run-as-root"]},
        ),
    ],
)
def test_a_run_by_open_mpi_on_two_nodes(login: Cluster, tiny_job: TinyJob, name: str, launcher: dict[str, Any]) -> None:
    values = settings(
        total_train_steps=3,
        **{"cluster.slurm.mpi_library": str(LIBRARY), "cluster.slurm.nodelist": "n[1-2]"},
        **launcher,
    )
    (job,) = submit(tiny_job.config(f"openmpi-{name}", **values))
    result = job.result(timeout=START_SECONDS)
    assert (result.code, result.outcome, result.steps) == (0, "done", 3), login.output(job.job_id)
    assert ledger_step(tiny_job.run(f"openmpi-{name}")) == 3
    assert {beat.heartbeat.host for beat in read_heartbeats(job.run)} == {"n1", "n2"}
    script = next(job.run.slurm.glob("*.sh")).read_text()
    assert "#SBATCH --nodes=2" in script
    assert_nothing_left(login, job.job_id)


def test_an_mpiexec_that_is_none_is_a_wrong_configuration(login: Cluster, tiny_job: TinyJob) -> None:
    """It is seen in the job only; the job's code and the handle's error say 78, as `pekoe run` does."""
    values = settings(**{"cluster.launcher": "mpiexec", "cluster.slurm.mpiexec": ["/usr/bin/true"]})
    (job,) = submit(tiny_job.config("no-mpiexec", **values))
    with pytest.raises(RunFailedError, match=r"the configuration is wrong: cluster\.slurm\.mpiexec: ") as caught:
        job.result(timeout=START_SECONDS)
    assert caught.value.exit_code == 78
    login.wait(job.job_id)
    assert login.facts(job.job_id)["ExitCode"] == "78:0"
