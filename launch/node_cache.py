"""Compile caches on a local disk of the node: a folder of this user, this job and this array task.

On a local disk renames and locks mean what libraries take for granted, so ranks of a node share Triton's, inductor's,
vLLM's and CANN's caches, and the next attempt of the job finds them warm. What a library guards by a plain lock file
would hang for ever after `kill -9`; that part is each rank's own (`own_folder`).
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from pekoe.launch.environment import Facts

SHARED = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "ASCEND_CACHE_PATH": "ascend",
    "ASCEND_PROCESS_LOG_PATH": "ascend-log",
}
"""Written under a temporary name and renamed, or named by process: safe for many ranks on one local disk."""
OWN = {
    "TORCH_EXTENSIONS_DIR": "extensions",
    "ASCEND_WORK_PATH": "ascend-work",
    "MPLCONFIGDIR": "matplotlib",
}
"""Guarded by lock files that outlive their owner, or meant for one process."""
ROOM_BYTES = 512 << 20
"""A place with less is taken only where there is no better one."""
PROBE_BYTES = 1 << 16
UNUSED_SECONDS = 86400.0
HELD = ".held"

_held: list[int] = []
"""Descriptors of locks, open until this process ends."""


def find(inherited: Mapping[str, str], facts: Facts) -> Path:
    """The folder for this job on this node, made if need be: the first place that has room, else the first that can be
    written. OSError when there is none."""
    bases = list(dict.fromkeys(base for base in (
        inherited.get("SLURM_TMPDIR"), inherited.get("TMPDIR"), "/tmp", "/dev/shm") if base))  # fmt: skip
    name = f"{_prefix()}{facts.job_id or 'cache'}"
    writable = []
    for base in bases:
        folder = Path(base) / name
        if not _can_be_written(folder):
            continue
        if shutil.disk_usage(folder).free >= ROOM_BYTES:
            return folder
        writable.append(folder)
    if writable:
        return writable[0]
    raise OSError(f"no writable folder for caches; tried {', '.join(bases)}: set TMPDIR")


def hold(folder: Path) -> None:
    """Says that a living process uses the folder, until this process ends."""
    descriptor = os.open(folder / HELD, os.O_RDWR | os.O_CREAT, 0o600)
    os.utime(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    _held.append(descriptor)


def own_folder(folder: Path, local_rank: int) -> Path:
    """A folder inside that no other living process has; lock files that a dead one left in it are gone."""
    for index in itertools.count(local_rank):
        own = folder / f"own-{index}"
        own.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(own / HELD, os.O_RDWR | os.O_CREAT, 0o600)
        if _is_mine_alone(descriptor):
            _held.append(descriptor)
            break
        os.close(descriptor)
    for stale in own.glob(f"{OWN['TORCH_EXTENSIONS_DIR']}/**/lock"):
        stale.unlink(missing_ok=True)
    return own


def delete_unused(folder: Path) -> list[Path]:
    """Removes caches of this user's other jobs that no process holds and that were not entered for a day."""
    removed = []
    for other in folder.parent.glob(f"{_prefix()}*"):
        held = other / HELD
        try:
            if other == folder or time.time() - held.stat().st_mtime < UNUSED_SECONDS:
                continue
            descriptor = os.open(held, os.O_RDWR)
        except OSError:
            continue
        if _is_mine_alone(descriptor):
            shutil.rmtree(other, ignore_errors=True)
            removed.append(other)
        os.close(descriptor)
    return removed


def variables(folder: Path, own: Path) -> dict[str, str]:
    """Variable -> folder."""
    shared = {name: str(folder / part) for name, part in SHARED.items()}
    return {**shared, **{name: str(own / part) for name, part in OWN.items()}}


def _prefix() -> str:
    return f"pekoe-{os.getuid()}-"


def _can_be_written(folder: Path) -> bool:
    """Mine, a real folder (in /tmp anybody may have made it before), with room for a file."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError:
        return False
    return True


def _is_mine_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
