"""The steps that Slurm runs for a job: which of them are worlds, and their end."""

from __future__ import annotations

import contextlib

from pekoe.launch.slurm_commands import SlurmError, ask

WORLD_STEPS = ("ranks", "hydra_pmi_proxy", "orted", "prted")
"""Names of steps that hold ranks or the daemons of an mpiexec; others (a shell of the user) are left alone."""
ANSWER_SECONDS = 10.0


def world_steps(job: str) -> list[str]:
    """Ids (`12.0`, `12_3.0`) of the worlds that run in the job. SlurmError when there is no answer."""
    said = ask(["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %j"], ANSWER_SECONDS)
    pairs = [line.split(None, 1) for line in said.splitlines() if line.strip()]
    return [pair[0] for pair in pairs if len(pair) == 2 and pair[1].strip().startswith(WORLD_STEPS)]


def end_world_steps(job: str) -> list[str]:
    """Kills them on every node; returns which there were. Without an answer of the controller, the end of the job
    does it."""
    with contextlib.suppress(SlurmError):
        steps = world_steps(job)
        if steps:
            ask(["scancel", "--signal=KILL", *steps], ANSWER_SECONDS)
        return steps
    return []
