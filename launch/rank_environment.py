"""The environment variables a rank works under: defaults where the user has set nothing, and nothing of other
launchers."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from pekoe.launch.environment import TORCH_VARIABLES, Facts, cores_per_rank, torch_variables

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
}
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "VLLM_CACHE_ROOT": "vllm",
    "ASCEND_CACHE_PATH": "ascend",
}
"""Compile caches: on a local disk, never in a home folder that many ranks and jobs race for."""


def rank_variables(inherited: Mapping[str, str], facts: Facts, threads: int | None, cache: Path) -> dict[str, str]:
    """The complete environment of a rank. A configured number of threads wins over the user's variable, which wins over
    the rank's share of the cores."""
    kept = {name: value for name, value in inherited.items() if name not in TORCH_VARIABLES}
    defaults = {**DEFAULTS, **{name: str(cache / folder) for name, folder in CACHES.items()}}
    defaults["OMP_NUM_THREADS"] = str(cores_per_rank(facts))
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**defaults, **kept, **chosen}


def trainer_variables(
    rank: int, trainer_ranks: tuple[int, ...], rollout_ranks: tuple[int, ...], local: int
) -> dict[str, str]:
    """torch's variables for a rank that only trains: numbers of its role. Empty for all others, colocated ones too."""
    if rank not in trainer_ranks or rank in rollout_ranks:
        return {}
    return torch_variables(trainer_ranks.index(rank), len(trainer_ranks), local)


def node_local_cache(inherited: Mapping[str, str], facts: Facts) -> Path:
    """A writable folder on a local disk, of this user and this job (or of this machine's user, outside of jobs)."""
    name = f"pekoe-{os.getuid()}-{facts.job_id or 'cache'}"
    bases = [inherited.get("SLURM_TMPDIR"), inherited.get("TMPDIR"), "/tmp", "/dev/shm"]
    for base in bases:
        if not base:
            continue
        folder = Path(base) / name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"writable")
        except OSError:
            continue
        return folder
    raise OSError(f"no writable folder for caches; tried {', '.join(base for base in bases if base)}: set TMPDIR")


def apply(environ: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """Makes `environ` equal to `variables`."""
    for name in set(environ) - set(variables):
        del environ[name]
    environ.update(variables)


def raise_open_files() -> int:
    """Lifts the soft limit of open files to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
