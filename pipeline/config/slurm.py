"""`cluster.slurm`: what a job asks Slurm for, and how its world is started inside the allocation."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.pipeline.config.fields import setting


@dataclass
class ContainerConfig:
    """The container that ranks run in; the launcher itself runs outside."""

    kind: str = setting(
        "none", "apptainer wraps each rank, enroot is asked of srun (pyxis)", choices=("none", "apptainer", "enroot")
    )
    image: str = setting("", "image file, or what enroot calls it")
    mounts: list[str] = setting(list, "folders seen inside, HOST or HOST:INSIDE; fileroot and models are added")
    python: str = setting("python3", "interpreter inside, with Pekoe's dependencies installed")


@dataclass
class SlurmConfig:
    """Every key that is null or empty leaves the choice to the site."""

    partition: str | None = setting(None, "partition(s), joined by commas")
    account: str | None = setting(None, "account that is charged")
    qos: str | None = setting(None, "quality of service")
    constraint: str | None = setting(None, "features that nodes must have")
    reservation: str | None = setting(None, "reservation to use")
    nodelist: str | None = setting(None, "nodes that must be among those given")
    exclude: str | None = setting(None, "nodes that must not be")
    gres: str | None = setting(
        None,
        "generic resource of a device, e.g. gpu:h100, npu:ascend910b; null = as the device kind says; '' = none",
    )
    exclusive: bool = setting(False, "nodes are not shared with other jobs")
    mem: str | None = setting(None, "memory of a node, e.g. 200G; 0 = all of it")
    cpus_per_task: int | None = setting(None, "cores of a rank; given to sbatch and to srun", minimum=1)
    signal_seconds: int = setting(120, "how long before its end Slurm warns the job", minimum=1, maximum=65535)
    extra: list[str] = setting(list, "more flags of sbatch, each as written there, e.g. --mail-type=END")
    srun_extra: list[str] = setting(list, "more flags of srun")
    setup: list[str] = setting(list, "lines of shell that the job runs first, e.g. module load openmpi")
    environment: dict[str, str] = setting(dict, "variables of every rank")
    mpi: str = setting("auto", "srun --mpi=…: auto asks the MPI library (pmi2 for MPICH, pmix for Open MPI)")
    mpi_library: str | None = setting(
        None, "libmpi.so of the site's MPI, in place of the one that mpi4py finds; null = that one"
    )
    mpiexec: list[str] = setting(
        list, "command of the site's mpiexec and its flags, for cluster.launcher mpiexec; empty = the wheel's"
    )
    packed_environment: str | None = setting(
        None, "archive of the Python environment, unpacked once on each node and used there"
    )
    container: ContainerConfig = setting(ContainerConfig, "container of the ranks")


@dataclass
class RolloutNodesConfig:
    """A second kind of node for rollout ranks: the job becomes heterogeneous. What is null is as in `cluster`."""

    n_nodes: int = setting(1, "nodes for rollout ranks; cluster.n_nodes counts the trainers' nodes then", minimum=1)
    n_gpus_per_node: int | None = setting(None, "devices on each of them", minimum=1)
    partition: str | None = setting(None, "their partition")
    constraint: str | None = setting(None, "their features")
    gres: str | None = setting(None, "their generic resource")
    mem: str | None = setting(None, "their memory")
    cpus_per_task: int | None = setting(None, "cores of a rank on them", minimum=1)
    extra: list[str] = setting(list, "more flags of sbatch for them")
