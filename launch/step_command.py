"""How a world starts inside an allocation: the argument list of srun or of the site's mpiexec.

    srun / mpiexec ─► [env NAME=VALUE…] ─► [packed environment | container] ─► python -u PROGRAM, once per rank

A launcher is a function from the job to an argument list. Those functions are pure; what must be asked of the machine
(which MPI does mpi4py load, what does srun offer, whose is this mpiexec) is asked by `choose_mpi`, once, by the driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pekoe.launch.batch_script import cores_of_a_rank, gres_request
from pekoe.launch.node_layout import NodeGroup, nodes_needed
from pekoe.launch.rank_command import container_mounts, mpi_variables, rank_command

if TYPE_CHECKING:
    from pekoe.launch.environment import Facts
    from pekoe.launch.placement import Placement
    from pekoe.pipeline.config.run import RunConfig

Launcher = Literal["join", "srun", "mpiexec", "local"]
MPIEXEC_FLAVOURS = ("hydra", "openmpi")
"""What `choose_mpi` says of an mpiexec; anything else is a word for `srun --mpi=`."""
PROBE_SECONDS = 60.0
PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
VENDORS = (
    ("CRAY MPICH", "cray_shasta"),
    ("Open MPI", "pmix"),
    ("MPICH", "pmi2"),
    ("Intel", "pmi2"),
    ("MVAPICH", "pmi2"),
)
"""Begin of a library's version text, and what of srun it talks to; the first that fits counts."""


SRUN_FLAGS = (
    "--kill-on-bad-exit=1", "--no-kill=off", "--wait=0", "--overlap", "--export=ALL", "--unbuffered", "--job-name=ranks"
)  # fmt: skip
"""A rank or node that dies ends the step (also where the allocation outlives it: sbatch --no-kill), one that is done
does not; a shell of the same job may hold the cores; the site's rules of export do not hold."""


@dataclass(frozen=True)
class Step:
    """One world to start."""

    program: tuple[str, ...]
    """Arguments after `python` of every rank."""
    num_ranks: int
    nodes: tuple[str, ...] = ()
    """Names to use, in the allocation's order, exactly as many as the world needs (of a heterogeneous job: those of its
    first component, then those of its second); empty = those of the allocation."""
    output: Path | None = None
    """Where srun writes what ranks print before their logs are open; None = its own output."""
    python: str = sys.executable


def step_command(step: Step, config: RunConfig, placement: Placement, mpi: str) -> list[str]:
    """The argument list that starts the world; `mpi` as `choose_mpi` gave it. ValueError when it cannot be made."""
    groups = nodes_needed(config, placement)
    if step.num_ranks != sum(group.num_ranks for group in groups):
        raise ValueError(f"allocation: {placement} is not a world of {step.num_ranks} ranks")
    needed = sum(group.num_nodes for group in groups)
    if step.nodes and len(step.nodes) != needed:
        raise ValueError(f"{len(step.nodes)} nodes ({','.join(step.nodes)}) for a world on {needed} nodes")
    if mpi in MPIEXEC_FLAVOURS:
        if len(groups) > 1:
            raise ValueError("cluster.launcher: 'mpiexec' sees the first component of a heterogeneous job only; "
                             "allowed with cluster.rollout_nodes: srun")  # fmt: skip
        return _mpiexec(step, config, groups[0], mpi)
    return _srun(step, config, groups, mpi)


def _srun(step: Step, config: RunConfig, groups: Sequence[NodeGroup], mpi: str) -> list[str]:
    """Of a heterogeneous job, the components joined by a colon: one MPI world, ranks in the components' order."""
    slurm = config.cluster.slurm
    program = rank_command(config, step.python, step.program, mpi)
    command = ["srun"]
    names = list(step.nodes)
    for index, group in enumerate(groups):
        own, names = names[: group.num_nodes], names[group.num_nodes :]
        part = [f"--het-group={index}"] if len(groups) > 1 else []
        part += _srun_layout(group, own, config, index)
        part += [f"--mpi={mpi}", *SRUN_FLAGS]
        if step.output is not None:
            part += [f"--output={step.output}", "--open-mode=append"]
        if slurm.container.kind == "enroot":
            part += _enroot(config)
        command += [*([":"] if index else []), *part, *slurm.srun_extra, *program]
    return command


def _srun_layout(group: NodeGroup, names: Sequence[str], config: RunConfig, component: int) -> list[str]:
    """Nodes, tasks and what each of them gets. srun inherits neither cores nor devices from the job for sure."""
    flags = [f"--nodes={group.num_nodes}", f"--ntasks={group.num_ranks}"]
    if group.is_even:
        flags += [f"--ntasks-per-node={group.most_ranks}", "--distribution=block:block"]
        flags += [f"--nodelist={','.join(names)}"] if names else []
    else:
        flags += ["--distribution=arbitrary", f"--nodelist={','.join(_host_of_each_rank(group, names))}"]
    cores = cores_of_a_rank(config, component)
    flags.append(f"--cpus-per-task={cores}" if cores is not None else "--cpu-bind=none")
    gres = gres_request(config, group, component)
    return flags + ([f"--gres={gres}"] if gres is not None else [])


def _host_of_each_rank(group: NodeGroup, names: Sequence[str]) -> list[str]:
    if not names:
        raise ValueError(
            f"{group.num_ranks} ranks on {group.num_nodes} nodes are not equally many on each "
            f"({', '.join(map(str, group.ranks_per_node))}): the names of the nodes are needed"
        )
    return [name for name, count in zip(names, group.ranks_per_node, strict=True) for _ in range(count)]


def _mpiexec(step: Step, config: RunConfig, group: NodeGroup, flavour: str) -> list[str]:
    """The site's command as given, or that of the wheel; where to put ranks in its own words."""
    given = config.cluster.slurm.mpiexec
    command = list(given) if given else [str(wheel_mpiexec(step.python)), "-bootstrap", "slurm"]
    if not step.nodes and (config.cluster.spare_nodes > 0 or not group.is_even):
        _host_of_each_rank(group, ())
    hosts = [f"{name}:{count}" for name, count in zip(step.nodes, group.ranks_per_node, strict=False)]
    command += ["-n", str(group.num_ranks)]
    if flavour == "openmpi":
        command += ["--host", ",".join(hosts)] if hosts else []
        command += ["--map-by", f"ppr:{group.most_ranks}:node" if group.is_even else "slot", "--bind-to", "none"]
    else:
        command += ["-ppn", str(group.most_ranks)] if group.is_even else []
        command += ["-hosts", ",".join(step.nodes if group.is_even else hosts)] if hosts else []
    return command + rank_command(config, step.python, step.program, flavour)


def wheel_mpiexec(python: str) -> Path:
    """The mpiexec that the `mpich` wheel puts beside an interpreter."""
    return Path(python).with_name("mpiexec")


def _enroot(config: RunConfig) -> list[str]:
    """pyxis starts each rank in the container."""
    container = config.cluster.slurm.container
    mounts = ",".join(f"{source}:{inside}" for source, inside in container_mounts(config))
    return [
        f"--container-image={container.image}",
        f"--container-mounts={mounts}",
        "--container-workdir=" + os.getcwd(),
    ]


def choose_launcher(config: RunConfig, facts: Facts, num_ranks: int | None = None) -> Launcher:
    """How the process that `facts` are of comes to its world of `num_ranks` (None: as the allocation says).

    join: it is a rank already, or alone the world; srun, mpiexec: inside its Slurm job; local: the wheel's
    mpiexec on this machine. ValueError names key, value and what is allowed here.
    """
    asked = config.cluster.launcher
    if asked == "none" or (facts.in_world and facts.size > 1):
        return "join"
    if facts.in_world and asked in ("auto", "srun"):
        from pekoe.launch.allocation import place

        if (place(config).world_size if num_ranks is None else num_ranks) == 1:
            return "join"
    if facts.job_id is None:
        if asked == "srun":
            raise ValueError(
                "cluster.launcher: 'srun', but this process is in no Slurm job; allowed here: auto, mpiexec or none "
                "(or start it inside a job: pekoe submit, sbatch scripts/train.sbatch, salloc)"
            )
        if config.cluster.rollout_nodes is not None:
            raise ValueError(
                "cluster.rollout_nodes: given, but this process is in no Slurm job; allowed here: null "
                "(or start it inside a job: pekoe submit, sbatch scripts/train.sbatch)"
            )
        return "local"
    return "mpiexec" if asked == "mpiexec" else "srun"


def choose_mpi(config: RunConfig, launcher: Launcher, python: str = sys.executable) -> str:
    """What `step_command` needs to know of this machine: the word for `srun --mpi=`, or the flavour of mpiexec.

    Asks mpi4py's MPI, srun or mpiexec, each with a time limit. ValueError says what does not fit.
    """
    slurm = config.cluster.slurm
    if launcher == "mpiexec":
        return mpiexec_flavour(slurm.mpiexec or [str(wheel_mpiexec(python))])
    mpi = detect_mpi(python, slurm.mpi_library) if slurm.mpi == "auto" else slurm.mpi
    check_mpi(mpi)
    return mpi


def detect_mpi(python: str, library: str | None) -> str:
    """The word for `srun --mpi=` that fits the MPI that mpi4py loads: pmi2 for MPICH, pmix for Open MPI.

    `library` takes the place of the one that mpi4py finds. A child process loads it and does not initialise MPI.
    """
    environ = {**os.environ, **mpi_variables(library)}
    try:
        done = subprocess.run(
            [python, "-c", PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS,
            check=False, env=environ,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"cluster.slurm.mpi: 'auto', but asking {python} for its MPI failed: {error}") from error
    said = done.stdout.strip()
    for beginning, mpi in VENDORS:
        if done.returncode == 0 and beginning in said:
            return mpi
    what = (said or done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    named = f" (cluster.slurm.mpi_library: {library!r})" if library else ""
    raise ValueError(
        f"cluster.slurm.mpi: 'auto', but the MPI of {python}{named} is not known: {what}; allowed: what "
        "`srun --mpi=list` shows (pmi2 for MPICH, pmix for Open MPI)"
    )


def check_mpi(mpi: str) -> None:
    """ValueError when this cluster's srun does not offer `--mpi=` so: a wrong one gives as many worlds as ranks."""
    try:
        done = subprocess.run(
            ["srun", "--mpi=list"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"cluster.launcher: srun cannot be used here: {error}") from error
    offered = offered_mpi(done.stdout + done.stderr)
    if offered and mpi not in offered:
        raise ValueError(
            f"cluster.slurm.mpi: {mpi!r} is not offered by this cluster's srun; allowed: {', '.join(offered)}, or "
            "cluster.launcher: mpiexec"
        )


def offered_mpi(text: str) -> list[str]:
    """The names in what `srun --mpi=list` says; empty when there are none in it."""
    names: list[str] = []
    for line in text.splitlines():
        words = line.removeprefix("srun:").strip()
        if "specific pmix plugin versions" in words:
            words = words.partition(":")[2].replace(",", " ")
        elif words.lower().startswith("mpi") or " " in words:
            continue
        names += words.split()
    return names


def mpiexec_flavour(command: Sequence[str]) -> str:
    """`hydra` (MPICH, Intel) or `openmpi`, by what `--version` says. ValueError when it is neither."""
    asked = [*command, "--version"]
    try:
        done = subprocess.run(
            asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"cluster.slurm.mpiexec: {' '.join(asked)} failed: {error}") from error
    said = done.stdout + done.stderr
    for flavour, marks in (("openmpi", ("Open MPI", "OpenRTE", "PRRTE")), ("hydra", ("HYDRA", "Intel(R) MPI"))):
        if any(mark in said for mark in marks):
            return flavour
    first = said.strip().splitlines()[0] if said.strip() else f"exit code {done.returncode}"
    raise ValueError(
        f"cluster.slurm.mpiexec: {' '.join(command)!r} is no mpiexec that is known here ({first}); allowed: that of "
        "MPICH, Intel MPI or Open MPI"
    )
