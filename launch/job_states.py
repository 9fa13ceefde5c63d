"""States of jobs as Slurm tells them: squeue first, since it knows what a job is doing now; sacct for what squeue has
forgotten, where the site keeps accounts.

A job that was preempted, or lost a node, and was put back into the queue is PENDING here: squeue shows one state, the
present one. Array elements have their own line (`12_3`), also while they wait together (`12_[3-9%2]`); a heterogeneous
job counts as one: what its first component does, or what another still does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pekoe.launch import slurm_commands
from pekoe.launch.slurm_commands import SlurmError

ENDED = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "DEADLINE",
        "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED", "GONE",
    }
)  # fmt: skip
"""A job does not leave these by itself."""
TAKEN = frozenset({"CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "DEADLINE"})
"""Slurm, or somebody by it, has ended the job."""
LIVING = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT"})
"""Its processes may live."""
GONE = "GONE"
"""Neither squeue nor sacct knows the job any more."""
UNKNOWN = "UNKNOWN"
"""Slurm gave no answer."""
JOBS_PER_COMMAND = 200


@dataclass(frozen=True)
class JobState:
    """What Slurm says of one job or array element."""

    state: str
    nodes: str = ""
    """Compact list."""
    reason: str = ""
    """Of waiting (Priority, Resources, Dependency, …) or of the end."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def read_states(jobs: Collection[str]) -> dict[str, JobState]:
    """The state of each job or array element. SlurmError when the controller gives no answer."""
    found: dict[str, JobState] = {}
    mains = sorted({main_id(job) for job in jobs}, key=int)
    for first in range(0, len(mains), JOBS_PER_COMMAND):
        found.update(_ask_squeue(mains[first : first + JOBS_PER_COMMAND]))
    lacking = [job for job in jobs if job not in found]
    if lacking:
        found.update(_ask_sacct(sorted({main_id(job) for job in lacking}, key=int), set(found)))
    return {job: found.get(job, JobState(GONE)) for job in jobs}


def read_state(job: str) -> JobState:
    """Of one job or array element."""
    return read_states([job])[job]


def main_id(job: str) -> str:
    """`12` of `12`, `12_3` and `12+0`."""
    return re.split(r"[_+]", job)[0]


def parse_states(lines: Iterable[str]) -> dict[str, JobState]:
    """Lines `id|state|nodes|reason` of squeue or sacct, job by job and element by element."""
    found: dict[str, JobState] = {}
    for line in lines:
        job, state, nodes, reason = (*line.strip().split("|"), "", "", "")[:4]
        if not job or "." in job or not state:
            continue
        # sacct: "CANCELLED by 0", "CANCELLED+"
        new = JobState(state.split()[0].rstrip("+"), "" if nodes.startswith(("None", "(null)")) else nodes, reason)
        for name in expand_job(job):
            present = found.get(name)
            if present is None or (present.has_ended and not new.has_ended and "+" in job):
                found[name] = new
    return found


def expand_job(job: str) -> list[str]:
    """`12_[0-2,5%2]` -> 12_0, 12_1, 12_2, 12_5; `12+1` -> 12; anything else is itself."""
    waiting = re.fullmatch(r"(\d+)_\[([\d,-]+)(%\d+)?\]", job)
    if waiting is None:
        return [job.partition("+")[0]]
    names = []
    for part in waiting[2].split(","):
        first, _, last = part.partition("-")
        names += [f"{waiting[1]}_{index}" for index in range(int(first), int(last or first) + 1)]
    return names


def _ask_squeue(jobs: list[str]) -> dict[str, JobState]:
    command = ["squeue", "--all", "--array", "--noheader", "--states=all", f"--jobs={','.join(jobs)}"]
    try:
        return parse_states(slurm_commands.ask([*command, "--format=%i|%T|%N|%r"]).splitlines())
    except SlurmError as error:
        # one job alone that is forgotten is an error to squeue, among others it is left out
        if "invalid job id" in str(error).lower():
            return {}
        raise


def _ask_sacct(jobs: list[str], known: set[str]) -> dict[str, JobState]:
    """Empty where accounts are not kept: what nobody knows is gone."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(jobs)}"]
    try:
        said = slurm_commands.ask([*command, "--format=JobID%-60,State,NodeList,Reason"])
    except SlurmError:
        return {}
    return {job: state for job, state in parse_states(said.splitlines()).items() if job not in known}
