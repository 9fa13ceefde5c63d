"""`cluster`: where the run lives and what it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.pipeline.config.fields import setting
from pekoe.pipeline.config.slurm import RolloutNodesConfig, SlurmConfig


@dataclass
class ClusterConfig:
    """Nodes, devices, the shared filesystem and how a world is started."""

    site: str | None = setting(
        None,
        "preset in configs/clusters, or a YAML file: under the keys of the YAML that names it, over them when given as "
        "cluster.site=NAME",
    )
    n_nodes: int = setting(1, "number of nodes of the world", minimum=1)
    n_gpus_per_node: int = setting(8, "devices on a node (any vendor); ranks per node never exceed it", minimum=1)
    fileroot: str = setting("runs", "root on the shared filesystem; the run directory is fileroot/experiment/trial")
    launcher: str = setting(
        "auto",
        "how the world starts: auto joins the one it is in, else srun inside a job, else mpiexec",
        choices=("auto", "mpiexec", "srun", "none"),
    )
    device: str = setting("auto", "device kind of every rank", choices=("auto", "cpu", "cuda", "npu"))
    threads_per_rank: int | None = setting(
        None, "CPU threads of torch on a rank; null = cores in the affinity mask / ranks on the node", minimum=1
    )
    heartbeat_seconds: float = setting(2.0, "interval of heartbeats", above=0)
    silence_seconds: float = setting(
        120.0, "the run fails when the main thread of a rank has sent no heartbeat for this long", above=0
    )
    time_limit: str | None = setting(
        "auto",
        "when the job ends, so that the run saves in time: auto takes it from Slurm; or as sbatch writes it "
        "(D-HH:MM:SS, HH:MM:SS, minutes), counted from the start of the job; null = no limit",
    )
    grace_seconds: float = setting(
        60.0, "time from the first stop signal to the hard end of the attempt, saving included", above=0
    )
    acknowledge_seconds: float = setting(
        10.0, "after a stop signal: nothing is saved unless every trainer rank answers within this time", above=0
    )
    abort_seconds: float = setting(5.0, "how long a failing world may take to write its error record", above=0)
    setup_seconds: float = setting(600.0, "limit for start-up: models loaded, groups formed", above=0)
    progress_seconds: float = setting(1800.0, "the run fails when no group and no step arrived for this long", above=0)
    full_disk_seconds: float = setting(3600.0, "how long a full disk or quota pauses the run before it fails", above=0)
    continue_by: str = setting(
        "none",
        "after a stop with a checkpoint: requeue the same job, chain (the next job waits in the queue), or none",
        choices=("none", "requeue", "chain"),
    )
    max_attempts: int = setting(20, "attempts of a run that Slurm or the launcher starts by itself", minimum=1)
    restart_in_place: int = setting(
        0, "how often a world that failed is started again inside the same allocation", minimum=0
    )
    spare_nodes: int = setting(0, "nodes more than n_nodes, to take the place of failed ones", minimum=0)
    ranks_per_writer: int = setting(
        64, "above so many rollout ranks, one rank of each node writes the shards of all of that node", minimum=1
    )
    rollout_nodes: RolloutNodesConfig | None = setting(
        None, "rollout ranks on another kind of node (heterogeneous job)"
    )
    slurm: SlurmConfig = setting(SlurmConfig, "what a job asks Slurm for")
