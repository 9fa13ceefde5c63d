"""The few words that Pekoe has with Slurm: each a command with a time limit, none of them needed to run a world.

Slurm's controller may be busy or down; a command that hangs must not hang a job that is about to save.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

COMMAND_SECONDS = 30.0
IDENTITY_PREFIXES = (
    "SLURM_JOB", "SLURM_STEP", "SLURM_TASK", "SLURM_ARRAY", "SLURM_PROC", "SLURM_LOCAL", "SLURM_NODE", "SLURM_NTASKS",
    "SLURM_NPROCS", "SLURM_NNODES", "SLURM_MEM_PER", "SLURM_CPUS", "SLURM_GPU", "SLURM_TRES", "SLURM_HET", "SLURM_PACK",
    "SLURM_SRUN", "SLURM_LAUNCH", "SLURM_UMASK", "SLURM_PRIO", "SLURM_TOPOLOGY", "SLURM_GTIDS", "SLURM_RESTART",
    "SLURM_SUBMIT", "SLURM_EXPORT", "SLURM_GET_USER", "SLURM_DISTRIBUTION", "SLURM_MPI_TYPE", "SLURM_CPU_BIND",
    "SLURM_THREADS", "SLURM_NO_KILL", "SLURM_OVERLAP", "SLURM_EXACT", "SLURM_WHOLE", "SLURMD_", "SBATCH_", "SRUN_",
    "SLURM_PTY", "SLURM_PMI", "SLURM_EXTERNAL", "SLURM_OPEN_MODE", "SLURM_WORKING", "SUBMITIT_",
    "PMI_", "PMI2_", "PMIX_", "OMPI_", "HYDI_", "MPI_LOCAL",
)  # fmt: skip
"""Variables that say which job, step or task a process belongs to. SLURM_CONF, SLURM_CLUSTERS and a site's own stay."""
JOB_DEVICES = (
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)  # fmt: skip
"""Lists of devices that Slurm gives to a job."""


class SlurmError(OSError):
    """A command of Slurm failed, or gave no answer in time; the text is what it said."""


def without_identity(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a job that is submitted from inside another: nothing of the outer job, all of the site."""
    devices = JOB_DEVICES if environ.get("SLURM_JOB_ID") else ()
    return {
        name: value for name, value in environ.items() if not name.startswith(IDENTITY_PREFIXES) and name not in devices
    }


def ask(
    arguments: Sequence[str], seconds: float | None = None, environ: Mapping[str, str] | None = None
) -> str:  # fmt: skip
    """Runs a command and returns its output. SlurmError when it is missing, fails, or takes longer than `seconds`
    (None: COMMAND_SECONDS)."""
    seconds = COMMAND_SECONDS if seconds is None else seconds
    try:
        done = subprocess.run(
            list(arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False,
            env=None if environ is None else dict(environ),
        )  # fmt: skip
    except FileNotFoundError:
        raise SlurmError(f"{arguments[0]}: not found on this machine") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{' '.join(arguments)}: no answer within {seconds:.0f} s") from None
    if done.returncode:
        raise SlurmError(f"{' '.join(arguments)}: {(done.stderr or done.stdout).strip() or done.returncode}")
    return done.stdout


def is_there() -> bool:
    """Whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None


def requeue(job: str) -> None:
    """Puts the job back into the queue; it ends where it runs."""
    ask(["scontrol", "requeue", job])


def cancel(*jobs: str) -> None:
    """Ends jobs, or array elements (`12_3`)."""
    ask(["scancel", *jobs])


def job_facts(job: str) -> dict[str, str]:
    """`scontrol show job`, name by name (JobState, Restarts, NodeList, TimeLimit, …); of a heterogeneous job, its first
    component's."""
    lines = ask(["scontrol", "--oneliner", "show", "job", job]).splitlines()
    return dict(word.split("=", 1) for word in (lines or [""])[0].split() if "=" in word)


def configuration() -> dict[str, str]:
    """`scontrol show config`, name by name (MaxArraySize, MpiDefault, PreemptMode, …)."""
    lines = ask(["scontrol", "show", "config"]).splitlines()
    pairs = (line.split("=", 1) for line in lines if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}
