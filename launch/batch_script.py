"""The text that sbatch is given, from the configuration. Pure: nothing is asked, started or written.

    #SBATCH lines ─► the site's set-up lines ─► exports ─► exec the driver

The batch shell becomes the driver, so that Slurm's warning signal reaches it and its exit code is the job's. The script
names everything that the job needs and relies on no variable of whoever submits it: a site may export nothing.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pekoe.launch.node_layout import NodeGroup, nodes_needed
from pekoe.pipeline.config.durations import duration_seconds
from pekoe.pipeline.registry import DEVICES, resolve

if TYPE_CHECKING:
    from pekoe.launch.placement import Placement
    from pekoe.pipeline.config.run import RunConfig

__all__ = ["BatchJob", "NodeGroup", "allocation_problem", "batch_script", "gres_request", "nodes_needed"]

CLEARED = (
    "SLURM_EXPORT_ENV", "SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_VERBOSE",
    "SLURM_MPI_TYPE", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
"""Variables of an outer job or of the site that would change what `srun` does; its flags say all of it."""


@dataclass(frozen=True)
class BatchJob:
    """What differs between jobs of the same configuration."""

    name: str
    command: tuple[str, ...]
    """What the batch shell becomes: the driver."""
    output: str
    """File for what the job prints, appended to; may hold %j, %A, %a."""
    array: str | None = None
    """Indices of a job array, e.g. `0-15%4`."""
    dependency: str | None = None
    """E.g. `afterany:123`."""


def batch_script(
    job: BatchJob, config: RunConfig, placement: Placement, environ: Mapping[str, str] = os.environ
) -> str:
    """The exact text for sbatch. ValueError names the key that it cannot be made with.

    `environ` is that of the submitter: PYTHONPATH, HOME and USER are written into the script, for sites whose jobs
    inherit nothing.
    """
    groups = nodes_needed(config, placement)
    if any(_gres_name(config, component) is None for component in range(len(groups))):
        raise ValueError(
            "cluster.device: 'auto' does not say which devices a job asks Slurm for; allowed: cpu, cuda or npu, "
            "or auto with cluster.slurm.gres ('' asks for none)"
        )
    if len(groups) > 1 and job.array is not None:
        raise ValueError(
            f"cluster.rollout_nodes: given, but Slurm has no arrays ({job.array}) of heterogeneous jobs; allowed: null"
        )
    flags = _job_flags(job, config) + _component_flags(config, groups[0], 0)
    lines = [f"#SBATCH {_quoted(flag)}" for flag in flags]
    for index, group in enumerate(groups[1:], 1):
        lines.append("#SBATCH hetjob")
        lines += [f"#SBATCH {_quoted(flag)}" for flag in _component_flags(config, group, index)]
    shell = "#!/bin/bash -l" if config.cluster.slurm.setup else "#!/bin/bash"
    body = [*config.cluster.slurm.setup, *_exports(config, environ), f"exec {shlex.join(job.command)}"]
    return "\n".join([shell, *lines, "", *body, ""])


def gres_request(config: RunConfig, group: NodeGroup, component: int) -> str | None:
    """`NAME:COUNT` of the devices on each node; None when none is asked for, or nobody said which."""
    name = _gres_name(config, component)
    return f"{name}:{group.most_ranks}" if name else None


def cores_of_a_rank(config: RunConfig, component: int) -> int | None:
    """Cores that a rank on the nodes of this component asks for; None = as the site gives them."""
    own = config.cluster.rollout_nodes
    if component == 1 and own is not None and own.cpus_per_task is not None:
        return own.cpus_per_task
    return config.cluster.slurm.cpus_per_task


def allocation_problem(
    config: RunConfig, placement: Placement, nodes: int, cpus_per_node: int | None = None, components: int = 1
) -> str:
    """What is wrong with the allocation that a driver finds itself in; empty when the world fits.

    `nodes` of component 0, spare ones included; `cpus_per_node` is the least that a node gives to the job, None when
    that is not known. The text names the flags of sbatch (salloc takes the same) that give the right one.
    """
    groups = nodes_needed(config, placement)
    first = groups[0]
    cores = first.most_ranks * (config.cluster.slurm.cpus_per_task or 1)
    problems = []
    if components != len(groups):
        wanted = "a heterogeneous job of 2 components (cluster.rollout_nodes)" if len(groups) > 1 else "an ordinary job"
        problems.append(f"it has {components} component(s), {wanted} is needed")
    if nodes < first.num_nodes:
        problems.append(f"it has {nodes} node(s), {first.num_nodes} are needed (cluster.n_nodes)")
    if cpus_per_node is not None and cpus_per_node < cores:
        each = config.cluster.slurm.cpus_per_task
        per_rank = f" of {each} cores (cluster.slurm.cpus_per_task)" if each else ""
        problems.append(f"it has {cpus_per_node} core(s) on a node, {first.most_ranks} rank(s){per_rank} need {cores}")
    if not problems:
        return ""
    flags = [_quoted(flag) for flag in _resource_flags(config, first, 0)]
    for index, group in enumerate(groups[1:], 1):
        flags += [":", *(_quoted(flag) for flag in _resource_flags(config, group, index))]
    return (
        f"this allocation does not fit {placement}: {'; '.join(problems)}. "
        f"Ask for: sbatch {' '.join(flags)} …, or let `pekoe submit` ask"
    )


def _job_flags(job: BatchJob, config: RunConfig) -> list[str]:
    """Flags of the whole job."""
    cluster = config.cluster
    given = [("job-name", job.name), ("output", job.output), ("array", job.array), ("dependency", job.dependency)]
    return [
        *(f"--{name}={value}" for name, value in given if value is not None),
        "--open-mode=append",
        f"--signal=B:USR2@{cluster.slurm.signal_seconds}",
        *cluster.slurm.extra,
    ]


def _component_flags(config: RunConfig, group: NodeGroup, component: int) -> list[str]:
    """Flags of the nodes of one kind. Slurm wants those of the job's life on every component."""
    cluster, slurm = config.cluster, config.cluster.slurm
    limit = cluster.time_limit
    flags = _resource_flags(config, group, component)
    given = [("account", slurm.account), ("qos", slurm.qos), ("reservation", slurm.reservation)]
    flags += [f"--{name}={value}" for name, value in given if value is not None]
    if limit is not None and duration_seconds(limit) is not None:
        flags.append(f"--time={limit}")
    flags.append("--requeue" if cluster.continue_by == "requeue" else "--no-requeue")
    if cluster.spare_nodes > 0 and cluster.restart_in_place > 0:
        flags.append("--no-kill")
    if component == 1 and cluster.rollout_nodes is not None:
        flags += cluster.rollout_nodes.extra
    return flags


def _resource_flags(config: RunConfig, group: NodeGroup, component: int) -> list[str]:
    """Flags that say which nodes, how many and how much of each."""
    slurm, own = config.cluster.slurm, config.cluster.rollout_nodes if component == 1 else None
    flags = [f"--nodes={group.num_nodes + group.spare_nodes}", f"--ntasks-per-node={group.most_ranks}"]
    cores = cores_of_a_rank(config, component)
    if cores is not None:
        flags.append(f"--cpus-per-task={cores}")
    gres = gres_request(config, group, component)
    if gres is not None:
        flags.append(f"--gres={gres}")
    for name in ("partition", "constraint", "mem"):
        value = getattr(own, name, None) or getattr(slurm, name)
        if value is not None:
            flags.append(f"--{name}={value}")
    if component == 0 and slurm.nodelist is not None:
        flags.append(f"--nodelist={slurm.nodelist}")
    if slurm.exclude is not None:
        flags.append(f"--exclude={slurm.exclude}")
    if slurm.exclusive:
        flags.append("--exclusive")
    return flags


def _gres_name(config: RunConfig, component: int) -> str | None:
    """The resource that a device is; "" = none is asked for, None = the configuration does not say."""
    own = config.cluster.rollout_nodes
    if component == 1 and own is not None and own.gres is not None:
        return own.gres
    if config.cluster.slurm.gres is not None or config.cluster.device == "auto":
        return config.cluster.slurm.gres
    return str(resolve(DEVICES, config.cluster.device, "cluster.device").gres_name)


def _exports(config: RunConfig, environ: Mapping[str, str]) -> list[str]:
    """Lines that set what driver and ranks need, whatever the job inherits; what the site's set-up lines have put
    on a path stays there, behind it."""
    lines = ['unset "${!SBATCH_@}" ' + " ".join(CLEARED)]
    lines.append(
        f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"${{PATH:-/usr/local/bin:/usr/bin:/bin}}"'
    )
    for name in ("HOME", "USER"):
        if environ.get(name):
            lines.append(f"export {name}=${{{name}:-{shlex.quote(environ[name])}}}")
    parts = [os.path.abspath(part) for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if parts:
        own = shlex.quote(os.pathsep.join(parts))
        lines.append(f'export PYTHONPATH={own}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    return lines + [f"export {name}={shlex.quote(value)}" for name, value in config.cluster.slurm.environment.items()]


def _quoted(flag: str) -> str:
    """As a line `#SBATCH` takes it."""
    return flag if "'" in flag or '"' in flag or " " not in flag else shlex.quote(flag)
