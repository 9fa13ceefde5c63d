"""Inside a Slurm allocation: becomes the launcher of the doctor's trial, made as a run's driver makes it.

python -m pekoe.launch.doctor.trial_step CONFIGURATION PROBE        (both as text: YAML, JSON)
"""

from __future__ import annotations

import dataclasses
import os
import sys

from pekoe.launch import environment
from pekoe.launch.allocation import place
from pekoe.launch.doctor.rank_probe import Said, say
from pekoe.launch.step_command import Step, choose_launcher, choose_mpi, step_command
from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.config.run import RunConfig

PROGRAM = ("-m", "pekoe.launch.doctor.rank_probe")
TRIAL_MINUTES = "3"
"""Time limit of the job, should nobody end it."""


def trial_config(config: RunConfig, num_nodes: int) -> RunConfig:
    """The same site with the smallest world that says something: two ranks on a node where it has two devices."""
    cluster = config.cluster
    per_node = min(2, cluster.n_gpus_per_node)
    if num_nodes == 1:
        per_node = 2
    half = num_nodes * per_node // 2
    gres = "" if cluster.slurm.gres is None and cluster.device == "auto" else cluster.slurm.gres
    slurm = dataclasses.replace(cluster.slurm, exclusive=False, mem=None, gres=gres)
    small = dataclasses.replace(
        cluster, n_nodes=num_nodes, n_gpus_per_node=per_node, rollout_nodes=None, spare_nodes=0,
        time_limit=TRIAL_MINUTES, continue_by="none", restart_in_place=0, site=None, slurm=slurm,
    )  # fmt: skip
    return dataclasses.replace(
        config,
        allocation=f"hf:d{half}+fsdp:d{half}",
        cluster=small,
        rollout=dataclasses.replace(config.rollout, backend=""),
        actor=dataclasses.replace(config.actor, backend=""),
    )


def main(configuration: str, probe: str) -> None:
    """Does not return, unless no world can be started: then it says why."""
    config = from_yaml_text(configuration)
    placement = place(config)
    try:
        launcher = choose_launcher(config, environment.read(os.environ), placement.world_size)
        mpi = choose_mpi(config, launcher)
        command = step_command(Step((*PROGRAM, probe), placement.world_size), config, placement, mpi)
    except ValueError as error:
        say(Said(refused=str(error)))
        return
    say(Said(phase=f"starting {' '.join(word for word in command[:-1] if len(word) < 100)}"))
    sys.stdout.flush()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
