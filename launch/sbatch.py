"""Hands a script to sbatch; what this process knows of a job that it is in itself stays out of the new one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pekoe.launch import slurm_commands
from pekoe.launch.slurm_commands import SlurmError

SUBMIT_SECONDS = 120.0
"""A busy controller may take its time; what it accepted after that is not known."""
PERSONAL_DEFAULTS = {
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_PARTITION": "--partition",
    "SBATCH_QOS": "--qos",
    "SBATCH_RESERVATION": "--reservation",
    "SBATCH_CONSTRAINT": "--constraint",
}
"""Variables that people set in their profiles, and the flag that each stands for."""


def submit_script(script: Path, flags: Sequence[str] = ()) -> str:
    """The id of the job that Slurm accepted. SlurmError says why it did not."""
    command = ["sbatch", *flags, str(script)]
    said = slurm_commands.ask(command, SUBMIT_SECONDS, submission_environment(os.environ, script.read_text()))
    found = re.search(r"Submitted batch job (\d+)", said)
    if found is None:
        raise SlurmError(f"{' '.join(command)}: accepted, but its answer names no job: {said.strip()!r}")
    return found[1]


def submission_environment(environ: Mapping[str, str], text: str) -> dict[str, str]:
    """What sbatch sees: nothing of an outer job, and of the user's own defaults those that the script leaves open
    (variables would win over the script's lines)."""
    kept = {
        name: environ[name]
        for name, flag in PERSONAL_DEFAULTS.items()
        if name in environ and not re.search(rf"^#SBATCH {flag}[= ]", text, re.MULTILINE)
    }
    return {**slurm_commands.without_identity(environ), **kept}


def largest_array() -> int:
    """Elements that one array may have here. SlurmError when the controller gives no answer."""
    size = int(slurm_commands.configuration().get("MaxArraySize", "1001"))
    if size < 1:
        raise SlurmError("this cluster takes no job arrays (MaxArraySize=0); submit the runs one by one")
    return size
