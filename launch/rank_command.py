"""What a launcher starts once per rank: the interpreter, in the environment or container that the configuration names.

Pure text. apptainer wraps the rank; enroot is asked of srun (pyxis), so that here only its interpreter is named.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pekoe.pipeline.config.run import RunConfig

DEVICE_FLAGS = {
    "cuda": ("--nv",),
    "npu": ("--bind", "/usr/local/Ascend/driver", "--bind", "/etc/ascend_install.info"),
}
"""Of apptainer. Device files are seen inside anyway; an NPU needs the host's driver, too."""
BIND_PMIX = 'exec "$0" "$1" ${PMIX_SERVER_TMPDIR:+--bind "$PMIX_SERVER_TMPDIR"} "${@:2}"'
"""Run by bash: the folder of the PMIx server is known when a rank starts, and must be seen inside."""


def rank_command(config: RunConfig, python: str, program: Sequence[str], mpi: str) -> list[str]:
    """The command of one rank. `mpi` is what the world is started by; `python` is not used inside a container."""
    slurm = config.cluster.slurm
    variables = {**slurm.environment, **mpi_variables(slurm.mpi_library)}
    command = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    if slurm.container.kind == "apptainer":
        return [*command, *_apptainer(config, mpi), slurm.container.python, "-u", *program]
    if slurm.container.kind == "enroot":
        return [*command, slurm.container.python, "-u", *program]
    if slurm.packed_environment is not None:
        unpack = [python, "-I", "-S", str(Path(__file__).with_name("packed_environment.py")), slurm.packed_environment]
        seconds = f"{config.cluster.setup_seconds:g}"
        return [*command, *unpack, "--seconds", seconds, "--", "python", "-u", *program]
    return [*command, python, "-u", *program]


def mpi_variables(library: str | None) -> dict[str, str]:
    """What makes mpi4py load this MPI library, whichever ABI it has."""
    return {} if library is None else {"MPI4PY_LIBMPI": library}


def container_mounts(config: RunConfig) -> list[tuple[str, str]]:
    """(on the host, inside) of each folder that ranks need: the run, models, data sets, what the user names."""
    own = [config.cluster.fileroot, config.actor.path, config.rollout.path, config.tokenizer_path]
    own += [data.path for data in (config.train_dataset, config.valid_dataset) if data is not None]
    own.append(os.getcwd())
    mounts = {path: path for path in own if path and os.path.isabs(path)}
    for given in config.cluster.slurm.container.mounts:
        source, _, inside = given.partition(":")
        mounts[source] = inside or source
    return sorted(mounts.items())


def _apptainer(config: RunConfig, mpi: str) -> list[str]:
    """`apptainer exec` with its flags and the image."""
    container = config.cluster.slurm.container
    command = ["apptainer", "exec"]
    if mpi.startswith("pmix"):
        command = ["bash", "-c", BIND_PMIX, *command]
    command += DEVICE_FLAGS.get(config.cluster.device, ())
    for source, inside in container_mounts(config):
        command += ["--bind", source if source == inside else f"{source}:{inside}"]
    return [*command, "--pwd", os.getcwd(), container.image]
