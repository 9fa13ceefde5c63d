"""Which MPI library mpi4py loads, and whether this cluster's srun speaks to it. The trial has the last word."""

from __future__ import annotations

import os
import subprocess
import sys

from pekoe.launch.rank_command import mpi_variables
from pekoe.launch.slurm_commands import SlurmError, ask
from pekoe.launch.step_command import PROBE, VENDORS, mpiexec_flavour, offered_mpi, wheel_mpiexec
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.runs.finding import Finding, note, ok, problem

AREA = "mpi"
LIBRARY_SECONDS = 20.0
ASK_SECONDS = 10.0


def examine(config: RunConfig, with_slurm: bool) -> list[Finding]:
    """Loads the library in a child process, without MPI_Init."""
    slurm = config.cluster.slurm
    words, error = library(slurm.mpi_library)
    if error:
        step = "pip install mpich (a wheel), or cluster.slurm.mpi_library: the site's libmpi.so"
        return [problem(AREA, f"mpi4py loads no MPI: {error}", step)]
    found = [ok(AREA, f"mpi4py loads {words}" + (f" ({slurm.mpi_library})" if slurm.mpi_library else ""))]
    if config.cluster.launcher == "mpiexec":
        return [*found, _mpiexec(config)]
    if not with_slurm:
        return found
    speaks = next((mpi for beginning, mpi in VENDORS if beginning in words), "")
    wanted = speaks if slurm.mpi == "auto" else slurm.mpi
    try:
        offered = offered_mpi(ask(["srun", "--mpi=list"], ASK_SECONDS) or _errors(["srun", "--mpi=list"]))
    except (SlurmError, OSError) as failure:
        return [*found, note(AREA, f"what srun offers is not known: {str(failure).splitlines()[-1]}")]
    listed = ", ".join(offered) or "nothing that is known"
    if not wanted:
        text = f"cluster.slurm.mpi is auto, and this library is not known; srun offers {listed}"
        return [*found, problem(AREA, text, f"cluster.slurm.mpi: one of {listed}")]
    if offered and wanted not in offered:
        text = f"the library needs srun --mpi={wanted}, which this cluster has not (it has {listed})"
        step = "cluster.launcher: mpiexec, or cluster.slurm.mpi_library: an MPI that the site built for its Slurm"
        return [*found, problem(AREA, text, step)]
    if speaks and speaks != wanted:
        text = f"cluster.slurm.mpi is {wanted}; this library usually speaks {speaks}"
        return [*found, note(AREA, text, "cluster.slurm.mpi: auto, unless the world below has met")]
    return [*found, ok(AREA, f"srun --mpi={wanted} is offered (all: {listed})")]


def library(path: str | None) -> tuple[str, str]:
    """(first line of the library's version, why there is none)."""
    environ = {**os.environ, **mpi_variables(path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ,
            timeout=LIBRARY_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"not loaded within {LIBRARY_SECONDS:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip("\x00\n ").splitlines()
    if done.returncode or not lines:
        return "", lines[-1] if lines else f"ended with {done.returncode}"
    return " ".join(lines[0].strip("\x00").split()), ""


def _mpiexec(config: RunConfig) -> Finding:
    command = config.cluster.slurm.mpiexec or [str(wheel_mpiexec(sys.executable))]
    try:
        return ok(AREA, f"{command[0]} is of the kind {mpiexec_flavour(command)}")
    except ValueError as error:
        return problem(AREA, str(error), "cluster.slurm.mpiexec: the site's command; or pip install mpich")


def _errors(command: list[str]) -> str:
    """Older versions of srun list on standard error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    return done.stderr
