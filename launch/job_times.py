"""When the job began and will end, for Slurms that do not tell it in the environment (before 23.02)."""

from __future__ import annotations

import time

from pekoe.launch.environment import Facts
from pekoe.launch.slurm_commands import SlurmError, ask
from pekoe.launch.terminal import say

ANSWER_SECONDS = 15.0
FORM = "%Y-%m-%dT%H:%M:%S"
VARIABLES = {"StartTime": "SLURM_JOB_START_TIME", "EndTime": "SLURM_JOB_END_TIME"}
"""What `scontrol show job` calls it -> what newer Slurms export (seconds since 1970)."""


def time_variables(facts: Facts) -> dict[str, str]:
    """Variables for the ranks; empty outside jobs, where they are set already, and where Slurm gives no answer."""
    if facts.job_id is None or facts.job_end_time is not None:
        return {}
    try:
        said = ask(["scontrol", "--oneliner", "show", "job", facts.job_id], ANSWER_SECONDS)
    except SlurmError as error:
        say(f"when the job ends is not known: {error}", fresh=False)
        return {}
    return parse_times(said)


def parse_times(text: str) -> dict[str, str]:
    """From `scontrol show job`: local times; what is Unknown or no time is left out. Of several the first counts."""
    found: dict[str, str] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        variable = VARIABLES.get(name)
        if variable is None or variable in found:
            continue
        try:
            found[variable] = str(int(time.mktime(time.strptime(value, FORM))))
        except (ValueError, OverflowError):
            continue
    return found
