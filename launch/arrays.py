"""Job arrays: many functions, in as few arrays as the cluster takes, each element with its own run.

elements ─► at most MaxArraySize each ─► sbatch ─► `accepted` (written down) ─► the next
                                            └─ refused (a limit of the user, the queue, the controller): stop
"""

from __future__ import annotations

from collections.abc import Callable

from pekoe.launch.job_states import main_id, read_states
from pekoe.launch.sbatch import largest_array
from pekoe.launch.slurm import ProcessExecutor, ScriptExecutor, run_submitted
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.sweeps import Sweep

Script = Callable[[int | None], str]
"""Number of elements, or None for a job -> the text for sbatch."""


def submit_rest(sweep: Sweep, script: Script, limit: int | None = None, most: int | None = None) -> Sweep:
    """Submits what Slurm has not accepted yet; returns the sweep with all jobs.

    `limit` elements run at once: of several arrays, the next waits for the end of the one before. `most` elements at
    most in an array, if that is less than the cluster allows. SlurmError when an array is refused: those before it
    stay, and are not submitted again by the next call.
    """
    if not sweep.rest:
        return sweep
    size = min(largest_array(), most or len(sweep.rest))
    previous = _unfinished_array(sweep) if limit is not None else None
    while rest := sweep.rest:
        part = rest[:size]
        flags = [f"--dependency=afterany:{previous}"] if previous is not None else []
        executor = ScriptExecutor(sweep.path / "slurm", script, flags)
        try:
            jobs = executor.map_array(run_submitted, [one.run for one in part])
        except SlurmError as error:
            raise SlurmError(
                f"{len(sweep.elements) - len(rest)} of {len(sweep.elements)} elements of {sweep.path} are submitted, "
                f"then Slurm refused: {error}. The same command again submits the other {len(rest)}"
            ) from error
        sweep = sweep.accepted({one.run: job.job_id for one, job in zip(part, jobs, strict=True)})
        previous = main_id(jobs[0].job_id) if limit is not None else None
    return sweep


def run_rest_here(sweep: Sweep, limit: int, variables: dict[str, str]) -> Sweep:
    """As `submit_rest`, in processes of this machine, `limit` at once."""
    executor = ProcessExecutor(sweep.path / "slurm", variables)
    before = [int(one.job_id) for one in sweep.elements if one.job_id and one.kind == "local"]
    for element in sweep.rest:
        after = before[-limit] if len(before) >= limit else None
        job = executor.submit(run_submitted, element.run, after=after)
        before.append(int(job.job_id))
        sweep = sweep.accepted({element.run: job.job_id}, "local")
    return sweep


def _unfinished_array(sweep: Sweep) -> str | None:
    """The newest array of the sweep, while an element of it may still run."""
    jobs = [one.job_id for one in sweep.elements if one.job_id and one.kind == "slurm"]
    if not jobs:
        return None
    newest = max((main_id(job) for job in jobs), key=int)
    states = read_states([job for job in jobs if main_id(job) == newest])
    return None if all(state.has_ended for state in states.values()) else newest
