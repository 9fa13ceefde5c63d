"""Facts about this process: the variables of srun, mpiexec and Slurm, read once and turned into one record.

The table below is the only place that names these variables; nobody else reads `os.environ` for them. Values of the
running step beat values of the job. Under hydra or orted inside Slurm the SLURM_* task variables describe the proxy,
so the process manager nearest to the rank wins. A batch script has task variables without a step, and an interactive
shell has a step of its own: neither is a rank. Pure functions of the mapping that is passed in.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pekoe.launch.slurm_lists import expand_hosts, expand_task_counts

VISIBLE_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": (),
    "ASCEND_RT_VISIBLE_DEVICES": ("SLURM_STEP_NPUS", "SLURM_JOB_NPUS"),
}
"""What the vendor's library reads -> where Slurm may have put the list when that is not set; a rank exports it."""
CONTAINER_VARIABLES = {"ASCEND_RT_VISIBLE_DEVICES": "ASCEND_VISIBLE_DEVICES"}
"""Devices that a container was given: the library counts them from 0, and they are no value for the former."""
PER_TASK_BINDINGS = ("per_task", "single", "map", "mask")
"""Forms of --gpu-bind, as slurmd tells them, that give each task a list of its own."""
INTERACTIVE_STEP = "4294967290"
"""Step id of the shell that salloc opens where LaunchParameters has use_interactive_step."""
TORCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
"""Variables of torch's own launchers: never inherited by a rank; trainer ranks get those of their role."""


@dataclass(frozen=True)
class Names:
    """Where one process manager puts each property; the first variable that is set counts."""

    launcher: str
    markers: tuple[str, ...]
    """It started us if all of these are set."""
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()


STEP_SIZE = ("SLURM_STEP_NUM_TASKS",)
PROCESS_MANAGERS = (
    Names(
        "openmpi", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Names(
        "mpich", ("PMI_RANK", "MPI_LOCALRANKID"), ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",),
        ("MPI_LOCALNRANKS",),
    ),
    Names("mpich", ("PMI_RANK", "HYDI_CONTROL_FD"), ("PMI_RANK",), ("PMI_SIZE",)),
    Names("pmix", ("PMIX_RANK",), ("PMIX_RANK",), STEP_SIZE, ("SLURM_LOCALID",)),
    Names("pmi2", ("PMI_RANK",), ("PMI_RANK",), (*STEP_SIZE, "PMI_SIZE"), ("SLURM_LOCALID",)),
    Names("srun", ("SLURM_PROCID", *STEP_SIZE), ("SLURM_PROCID",), STEP_SIZE, ("SLURM_LOCALID",)),
)  # fmt: skip
"""Nearest first. `srun` is srun without any PMI: each task is an MPI world of its own, which the size check finds."""
STEP_LAUNCHERS = ("pmix", "pmi2", "srun")
STEP_PREFIXES = (
    "SLURM_STEP", "SLURM_PTY", "SLURM_CPU_BIND", "SLURM_MPI_TYPE", "SLURM_SRUN_COMM", "SLURM_LAUNCH_NODE", "SLURM_PMI",
    "SLURM_GTIDS", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_NODEID", "SLURM_TASK_PID", "SLURM_DISTRIBUTION",
    "SLURMD_TRES_BIND", "PMI_", "PMI2_", "PMIX_", "OMPI_COMM_WORLD", "OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix",
    "OMPI_UNIVERSE", "PRTE_", "HYDI_", "MPI_LOCAL",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What the environment says of this process."""

    launcher: str
    """Who started it: openmpi, mpich, pmix, pmi2, srun, or none (a single process)."""
    rank: int
    size: int
    """Ranks that MPI must find too."""
    local_rank: int
    local_size: int | None
    """Ranks of the world on this node; None = not said."""
    host: str
    node_rank: int | None
    num_nodes: int | None
    job_id: str | None
    """Slurm job, `<array job>_<task>` in an array."""
    step_size: int | None
    """Tasks of the running Slurm step, if one started us."""
    visible: Mapping[str, tuple[str, ...] | None]
    """Per visible-devices variable its list; None = not set, () = set and empty."""
    narrowed: bool
    """Slurm gave each task its own devices (`--gpus-per-task` and the like): the visible list is this task's alone."""
    cores_on_node: int | None
    notes: tuple[str, ...] = ()
    """Sentences for the log about what was seen and not followed."""
    job_start_time: str | None = None
    """Of the Slurm job, as it stands in the environment (seconds since 1970); None = not set."""
    job_end_time: str | None = None
    job_nodes: tuple[str, ...] = ()
    """Names of the nodes of the allocation, of all its components."""
    step_nodes: tuple[str, ...] = ()
    """Names of the nodes of the running step, in the order of their ranks; () = no step started us."""
    het_groups: tuple[tuple[str, ...], ...] = ()
    """Nodes of each component of a heterogeneous job; () = an ordinary one."""
    restart_count: int = 0
    """How often Slurm has started the job again."""
    array_task: int | None = None
    cluster: str | None = None
    """Slurm's name of the cluster."""
    cpus_per_task: int | None = None
    exported: Mapping[str, str] = field(default_factory=dict)
    """Lists of visible devices that a rank must export for the vendor's library to see them."""

    @property
    def in_world(self) -> bool:
        """An MPI launcher or srun started this process."""
        return self.launcher != "none"

    @property
    def in_allocation(self) -> bool:
        """A job's batch script or a shell inside an allocation: it may start a step, and is no rank itself."""
        return self.job_id is not None and not self.in_world

    @property
    def several_hosts(self) -> bool:
        """The world spans more than one node, as far as the environment says."""
        if self.num_nodes is not None:
            return self.num_nodes > 1
        return self.local_size is not None and self.size > self.local_size


@dataclass(frozen=True)
class Device:
    """The device of a rank."""

    name: str
    """As it stands in the visible list: an index or a UUID."""
    ordinal: int
    """Position in the visible list: what the vendor's library counts."""


def read(environ: Mapping[str, str], host: str | None = None) -> Facts:
    """The facts of this process. ValueError names a variable that is no number."""
    names = next((n for n in PROCESS_MANAGERS if all(environ.get(marker) for marker in n.markers)), None)
    if names is not None and names.launcher in STEP_LAUNCHERS and _is_interactive(environ):
        names = None
    in_step = names is not None and names.launcher in STEP_LAUNCHERS
    step_size = _number(environ, *STEP_SIZE) if in_step else None
    node_rank = _number(environ, "SLURM_NODEID") if in_step else None
    rank = (_number(environ, *names.rank) or 0) if names else 0
    size = (_number(environ, *names.size) or 1) if names else 1
    het_groups = _het_groups(environ)
    lists = {name: _visible(environ, name) for name in VISIBLE_VARIABLES}
    return Facts(
        launcher=names.launcher if names else "none",
        rank=rank,
        size=size,
        local_rank=(_number(environ, *names.local_rank) or 0) if names else 0,
        local_size=_local_size(environ, names, node_rank),
        host=host or environ.get("SLURMD_NODENAME") or socket.gethostname(),
        node_rank=node_rank,
        num_nodes=_number(environ, "SLURM_STEP_NUM_NODES") if in_step else None,
        job_id=_job_id(environ),
        step_size=step_size,
        visible={name: listed for name, (listed, _) in lists.items()},
        narrowed=in_step and _is_narrowed(environ),
        cores_on_node=_number(environ, "SLURM_CPUS_ON_NODE"),
        notes=_notes(environ, names),
        job_start_time=environ.get("SLURM_JOB_START_TIME"),
        job_end_time=environ.get("SLURM_JOB_END_TIME"),
        job_nodes=tuple(node for group in het_groups for node in group) or _hosts(environ, "SLURM_JOB_NODELIST"),
        step_nodes=_hosts(environ, "SLURM_STEP_NODELIST") if in_step else (),
        het_groups=het_groups,
        restart_count=_number(environ, "SLURM_RESTART_COUNT") or 0,
        array_task=_number(environ, "SLURM_ARRAY_TASK_ID"),
        cluster=environ.get("SLURM_CLUSTER_NAME") or None,
        cpus_per_task=_number(environ, "SLURM_CPUS_PER_TASK"),
        exported={name: export for name, (_, export) in lists.items() if export is not None},
    )


def for_step(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun or mpiexec inside an allocation: the job's variables, nothing of the step or the
    process manager that the caller itself runs under."""
    return {name: value for name, value in environ.items() if not name.startswith(STEP_PREFIXES)}


def pick_device(facts: Facts, variable: str, num_devices: int | None = None, ranks_per_device: int = 1) -> Device:
    """The device of this rank, out of the visible list of `variable`.

    `num_devices` is what the vendor's library counts, needed only where the variable is not set. Distinct ranks of a
    node get distinct devices unless `ranks_per_device` says otherwise. ValueError where there are more ranks than
    devices, or the list names a device twice (or, for Ascend, not in ascending order).
    """
    listed = facts.visible.get(variable)
    if listed is None:
        count = num_devices if num_devices is not None else (facts.local_size or facts.local_rank + 1)
        listed = tuple(str(index) for index in range(count))
    if not listed:
        raise ValueError(f"{variable}: no device is visible on {facts.host}; allowed: at least one per rank")
    _check_list(variable, listed)
    if facts.narrowed or (len(listed) == 1 and facts.local_size is None):
        return Device(listed[0], 0)
    ranks = facts.local_size if facts.local_size is not None else facts.local_rank + 1
    if ranks > len(listed) * ranks_per_device:
        raise ValueError(
            f"{variable}: {ranks} ranks on {facts.host} but {len(listed)} visible devices ({','.join(listed)}); "
            f"allowed: at most {ranks_per_device} rank(s) per device: "
            "start fewer ranks per node or ask for more devices"
        )
    ordinal = facts.local_rank // ranks_per_device
    return Device(listed[ordinal], ordinal)


def check_distinct(identities: Sequence[str]) -> None:
    """ValueError when two ranks hold one physical device; `identities` by rank, '' for what may be shared.

    The last word on devices: neither a variable nor a list says whether Slurm gave one device to two tasks.
    """
    holders: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if identity and holders.setdefault(identity, rank) != rank:
            raise ValueError(
                f"device {identity}: ranks {holders[identity]} and {rank} both hold it; allowed: a rank per device "
                "(look at --gpu-bind, --gpus-per-task and the visible-devices variable of the tasks)"
            )


def guess_variable(facts: Facts) -> str | None:
    """The visible-devices variable that says something here; None where no vendor's list is set."""
    return next((name for name in VISIBLE_VARIABLES if facts.visible.get(name)), None)


def cores_per_rank(facts: Facts, affinity: set[int] | None = None) -> int:
    """CPU cores that this rank may keep busy: its affinity mask, shared with the node's other ranks unless it is its
    own."""
    mask = len(affinity if affinity is not None else os.sched_getaffinity(0))
    ranks = facts.local_size or 1
    bound_per_task = facts.in_world and facts.cores_on_node is not None and mask * ranks <= facts.cores_on_node
    return mask if bound_per_task else max(1, mask // ranks)


def missing_cores(facts: Facts, affinity: set[int] | None = None) -> str | None:
    """A sentence for the log where a task has fewer cores than the job asked for; None where all is well."""
    mask = len(affinity if affinity is not None else os.sched_getaffinity(0))
    if facts.launcher not in STEP_LAUNCHERS or facts.cpus_per_task is None or mask >= facts.cpus_per_task:
        return None
    return (
        f"{mask} of the {facts.cpus_per_task} cores of SLURM_CPUS_PER_TASK may be used by this rank; "
        "srun takes --cpus-per-task from its own command line alone"
    )


def wrong_size(expected: int, facts: Facts) -> str:
    """What is wrong when the process manager started another number of ranks than the allocation needs."""
    seen = f" ({'; '.join(facts.notes)})" if facts.notes else ""
    return f"the allocation needs {expected} ranks but {facts.launcher} started {facts.size}{seen}; start {expected}"


def torch_variables(role_rank: int, role_size: int, local_rank: int) -> dict[str, str]:
    """What a rank that only trains exports for torch: numbers of its role, never of the world."""
    return {"RANK": str(role_rank), "WORLD_SIZE": str(role_size), "LOCAL_RANK": str(local_rank)}


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environ.get(name)
        if text:
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"{name}: {text!r} in the environment is not a number; allowed: an integer") from None
    return None


def _local_size(environ: Mapping[str, str], names: Names | None, node_rank: int | None) -> int | None:
    if names is None:
        return 1
    if names.local_size:
        return _number(environ, *names.local_size)
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if names.launcher not in STEP_LAUNCHERS or not counts or node_rank is None:
        return None
    per_node = expand_task_counts(counts)
    return per_node[node_rank] if node_rank < len(per_node) else None


def _job_id(environ: Mapping[str, str]) -> str | None:
    array = environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return environ.get("SLURM_JOB_ID") or None


def _is_interactive(environ: Mapping[str, str]) -> bool:
    """A shell that salloc or `srun --pty` opened on a node: a step of one task that is no world."""
    in_terminal = bool(environ.get("SLURM_PTY_PORT")) and environ.get("SLURM_STEP_NUM_TASKS") == "1"
    return in_terminal or environ.get("SLURM_STEP_ID") == INTERACTIVE_STEP


def _is_narrowed(environ: Mapping[str, str]) -> bool:
    """slurmd's word counts; without it, what was asked for."""
    binding = environ.get("SLURMD_TRES_BIND") or environ.get("SLURM_GPU_BIND")
    if binding:
        return any(form in binding for form in PER_TASK_BINDINGS)
    return any(environ.get(name) for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"))


def _het_groups(environ: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    count = _number(environ, "SLURM_HET_SIZE") or 0
    return tuple(_hosts(environ, f"SLURM_JOB_NODELIST_HET_GROUP_{index}") for index in range(count))


def _hosts(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = environ.get(name)
    return tuple(expand_hosts(text)) if text else ()


def _visible(environ: Mapping[str, str], name: str) -> tuple[tuple[str, ...] | None, str | None]:
    """(the list, what to export so that the library sees it)."""
    if name in environ:
        return _device_list(environ[name]), None
    for source in VISIBLE_VARIABLES[name]:
        listed = _device_list(environ.get(source))
        if listed is not None:
            return listed, ",".join(listed)
    return _device_list(environ.get(CONTAINER_VARIABLES.get(name, ""))), None


def _device_list(text: str | None) -> tuple[str, ...] | None:
    """`0,2-3` or `GPU-uuid,…` -> names. A UUID holds hyphens of its own: only numbers make a range."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",")]
    if names[0] in ("", "-1", "NoDevFiles"):
        return ()
    listed: list[str] = []
    for name in names:
        first, _, last = name.partition("-")
        if first.isdigit() and last.isdigit():
            listed += [str(index) for index in range(int(first), int(last) + 1)]
        elif name:
            listed.append(name)
    return tuple(listed)


def _check_list(variable: str, listed: tuple[str, ...]) -> None:
    text = ",".join(listed)
    if len(set(listed)) < len(listed):
        raise ValueError(f"{variable}: {text} names a device twice; allowed: each device once")
    numbers = [int(name) for name in listed if name.isdigit()]
    if variable.startswith("ASCEND") and numbers != sorted(numbers):
        raise ValueError(f"{variable}: {text} is not in ascending order, which CANN asks for; write {_sorted(numbers)}")


def _sorted(numbers: list[int]) -> str:
    return ",".join(str(number) for number in sorted(numbers))


def _notes(environ: Mapping[str, str], names: Names | None) -> tuple[str, ...]:
    if names is None and environ.get("SLURM_NTASKS"):
        return (
            f"SLURM_NTASKS={environ['SLURM_NTASKS']} describes the job, and no step started this process: "
            "it counts as a single process",
        )
    if names and names.launcher not in STEP_LAUNCHERS and environ.get("SLURM_PROCID"):
        return (f"SLURM_PROCID={environ['SLURM_PROCID']} describes the proxy of {names.launcher}, not this rank",)
    return ()
