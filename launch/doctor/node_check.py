"""What a node offers beside devices: cores, limits, local disk, home, caches, and whether the Hub stays unasked."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pekoe.launch import rank_environment
from pekoe.launch.doctor.filesystem_trial import filesystem_kind
from pekoe.launch.doctor.rank_pair import attempt
from pekoe.launch.environment import Facts
from pekoe.pipeline.runs.disk_estimate import amount
from pekoe.pipeline.runs.finding import Finding, note, ok, problem

AREA = "nodes"
NETWORK_KINDS = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "cifs",
    "smb3",
    "ceph",
    "fuse.sshfs",
    "afs",
    "panfs",
    "wekafs",
)
OPEN_FILES = 4096
LOCAL_BYTES = 2 << 30
SHARED_MEMORY_BYTES = 1 << 30
HOME_BYTES = 1 << 30
SHARED_MEMORY_NAMES = ("mpich_shm_", "vader_segment", "sm_segment", "nccl-", "torch_", "psm")
UNUSED_SECONDS = 600.0
LEFT_OVER_BYTES = 64 << 20


class NodeFacts(msgspec.Struct):
    """Of one host, by its first rank."""

    host: str
    cores: int
    """In this process's affinity mask."""
    cores_on_node: int
    open_files: int
    """Hard limit."""
    locked_memory: int
    """Hard limit of memory that may be page-locked, bytes; -1 = none."""
    local: str = ""
    """Folder for caches, on a local disk."""
    local_error: str = ""
    local_kind: str = ""
    local_free: int = 0
    shared_memory_free: int = 0
    left_over: list[int] = []
    """(files, bytes) in /dev/shm of this user's dead processes."""
    home_kind: str = ""
    home_free: int | None = None
    """None: HOME is not there."""
    caches: dict[str, str] = {}
    """Cache variables that the user has set, with the kind of filesystem behind them."""
    offline: str | None = None
    """HF_HUB_OFFLINE of a rank; None = neither set nor given by default."""


def measure(facts: Facts, environ: Mapping[str, str]) -> NodeFacts:
    """Leaves nothing behind."""
    home = Path(environ.get("HOME", "/nonexistent"))
    node = NodeFacts(
        host=facts.host,
        cores=len(os.sched_getaffinity(0)),
        cores_on_node=facts.cores_on_node or os.cpu_count() or 1,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        home_kind=filesystem_kind(home) if home.is_dir() else "",
        home_free=shutil.disk_usage(home).free if home.is_dir() else None,
        caches={name: filesystem_kind(Path(environ[name])) for name in rank_environment.CACHES if environ.get(name)},
        offline=environ.get("HF_HUB_OFFLINE") or rank_environment.DEFAULTS.get("HF_HUB_OFFLINE"),
    )
    found = attempt(lambda: rank_environment.node_local_cache(environ, facts))
    node.local_error = found.error
    if not found.error:
        folder = Path(found.value)
        node.local, node.local_kind = str(folder), filesystem_kind(folder)
        node.local_free = shutil.disk_usage(folder).free
        with suppress(OSError):
            folder.rmdir()
    if Path("/dev/shm").is_dir():
        node.shared_memory_free = shutil.disk_usage("/dev/shm").free
        node.left_over = left_over(Path("/dev/shm"))
    return node


def left_over(folder: Path) -> list[int]:
    """(files, bytes) that MPI or NCCL made for this user and that no process of this user uses any more."""
    used = {path for maps in Path("/proc").glob("[0-9]*/maps") for path in _mapped(maps, str(folder))}
    count = size = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                old = time.time() - facts.st_mtime > UNUSED_SECONDS
                if entry.name.startswith(SHARED_MEMORY_NAMES) and facts.st_uid == os.getuid() and old:
                    if entry.path in used:
                        continue
                    count, size = count + 1, size + facts.st_blocks * 512
    return [count, size]


def _mapped(maps: Path, folder: str) -> list[str]:
    """Files of the folder in one process's memory; none where it is another user's or gone."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line[line.index(folder) :].removesuffix(" (deleted)") for line in lines if folder in line]


def judge(nodes: Sequence[NodeFacts], cpus_per_task: int | None, devices: Collection[str]) -> list[Finding]:
    """`devices`: the kinds that ranks use."""
    found: list[Finding] = []
    for node in nodes:
        text = (
            f"{node.host}: {node.cores} of {node.cores_on_node} cores a rank, caches in {node.local} "
            f"({node.local_kind}, {amount(node.local_free)} free), {node.open_files} open files"
        )
        found += [] if node.local_error else [ok(AREA, text)]
        found += [*_local(node), *_limits(node, devices), *_cores(node, cpus_per_task), *_home(node)]
    return found + _offline(nodes)


def _local(node: NodeFacts) -> list[Finding]:
    if node.local_error:
        step = "cluster.slurm.environment: {TMPDIR: a writable folder on each node's own disk}"
        return [problem(AREA, f"{node.host}: {node.local_error}", step)]
    if node.local_kind in NETWORK_KINDS:
        text = f"{node.host}: {node.local} for compile caches is on {node.local_kind}, not on a local disk"
        return [problem(AREA, text, "cluster.slurm.environment: {TMPDIR: /tmp or what the site calls its local disk}")]
    if node.local_free < LOCAL_BYTES:
        kind = ", and it is memory" if node.local_kind == "tmpfs" else ""
        text = f"{node.host}: {amount(node.local_free)} free in {node.local} for compile caches{kind}"
        return [note(AREA, text, "cluster.slurm.environment: {TMPDIR: a larger folder on the node's own disk}")]
    return []


def _limits(node: NodeFacts, devices: Collection[str]) -> list[Finding]:
    found = []
    if 0 <= node.open_files < OPEN_FILES:
        text = f"{node.host}: at most {node.open_files} open files a process"
        found.append(note(AREA, text, "ask the site for a hard limit (ulimit -Hn) of 65536 in jobs"))
    if set(devices) - {"cpu"} and 0 <= node.locked_memory < 1 << 30:
        text = f"{node.host}: at most {amount(node.locked_memory)} of page-locked memory: fast fabrics need more"
        found.append(note(AREA, text, "ask the site for an unlimited memlock in jobs (ulimit -Hl)"))
    if node.shared_memory_free < SHARED_MEMORY_BYTES:
        text = f"{node.host}: {amount(node.shared_memory_free)} free in /dev/shm, which NCCL and gloo use on a node"
        found.append(note(AREA, text, "a container may limit it: mount the host's /dev/shm"))
    count, size = node.left_over or (0, 0)
    if size > LEFT_OVER_BYTES:
        text = f"{node.host}: {count} files of dead worlds hold {amount(size)} of memory in /dev/shm"
        step = f"with no job of yours on {node.host}: find /dev/shm -user $USER -name 'mpich_shm_*' -delete"
        found.append(note(AREA, text, step))
    return found


def _cores(node: NodeFacts, cpus_per_task: int | None) -> list[Finding]:
    if cpus_per_task and node.cores < cpus_per_task:
        text = f"{node.host}: a rank may use {node.cores} cores, cluster.slurm.cpus_per_task is {cpus_per_task}"
        return [
            problem(
                AREA, text, "a binding of srun keeps it from its cores: cluster.slurm.srun_extra: [--cpu-bind=cores]"
            )
        ]
    if node.cores == 1 and node.cores_on_node > 1 and not cpus_per_task:
        text = f"{node.host}: a rank may use 1 of {node.cores_on_node} cores"
        return [note(AREA, text, "cluster.slurm.cpus_per_task: cores of the node / ranks of the node")]
    return []


def _home(node: NodeFacts) -> list[Finding]:
    found = []
    if node.home_free is not None and node.home_free < HOME_BYTES:
        text = f"{node.host}: {amount(node.home_free)} free in the home folder"
        found.append(
            note(AREA, text, "Pekoe keeps nothing large there; other libraries may: set HF_HOME, XDG_CACHE_HOME")
        )
    slow = [f"{name} ({kind})" for name, kind in node.caches.items() if kind in NETWORK_KINDS]
    if slow:
        text = f"{node.host}: caches that ranks write at the same time are on a network filesystem: {', '.join(slow)}"
        found.append(note(AREA, text, "unset these variables: each job then has its own on the node's disk"))
    return found


def _offline(nodes: Sequence[NodeFacts]) -> list[Finding]:
    asking = [node.host for node in nodes if (node.offline or "0").lower() in ("0", "false", "no", "off")]
    if asking:
        text = f"HF_HUB_OFFLINE is off on {', '.join(asking)}: a node without a way out waits for the Hub at start-up"
        return [note(AREA, text, "unset HF_HUB_OFFLINE: ranks then have it on, and models are local paths anyway")]
    return [ok(AREA, "the Hub is not asked (HF_HUB_OFFLINE=1)")]
