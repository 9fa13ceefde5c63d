"""What `pekoe status` says of jobs: of a run's, and of all elements of a sweep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pekoe.launch.attempts import RunDirectoryError
from pekoe.launch.job_states import GONE, JobState, read_states
from pekoe.launch.run_result import attempt_code
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.submitted_jobs import JobEntry, jobs_of
from pekoe.launch.sweeps import Sweep, read_sweep
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

SHOWN = 5
"""Jobs and attempts that are listed: the newest."""
SHOWN_ELEMENTS = 64


def jobs_text(run: RunDirectory) -> str:
    """A line for each of the newest jobs, then for each of the newest attempts; empty for a run that has neither."""
    return "\n".join([*_job_lines(run), *_attempt_lines(run)])


def sweep_text(sweep: Sweep) -> str:
    """A line for each element: job, state, run directory."""
    jobs = [one.job_id for one in sweep.elements if one.job_id and one.kind == "slurm"]
    try:
        states = read_states(jobs) if jobs else {}
    except SlurmError as error:
        return f"sweep {sweep.path}: Slurm gives no answer: {error}"
    words = {one.run: _element_state(one.job_id, one.kind, Path(one.run), states) for one in sweep.elements}
    counts = ", ".join(f"{number} {state}" for state, number in sorted(Counter(words.values()).items()))
    lines = [f"sweep {sweep.path}: {len(sweep.elements)} elements ({counts})"]
    for one in sweep.elements[:SHOWN_ELEMENTS]:
        lines.append(f"  {one.job_id or '-':>12}  {words[one.run]:<14}  {' '.join(one.overrides)}  {one.run}")
    hidden = len(sweep.elements) - SHOWN_ELEMENTS
    return "\n".join([*lines, *([f"  and {hidden} more"] if hidden > 0 else [])])


def check_is_no_sweep(path: Path, command: str) -> None:
    """RunDirectoryError for a sweep's folder: `pekoe COMMAND` takes one of its runs, which the text lists."""
    sweep = read_sweep(path)
    if sweep is not None:
        first = sweep.elements[0].run if sweep.elements else "RUN"
        raise RunDirectoryError(
            f"{path} is a sweep; `pekoe {command}` takes one of its runs, e.g. `pekoe {command} {first}`\n"
            f"{sweep_text(sweep)}"
        )


def _job_lines(run: RunDirectory) -> list[str]:
    from pekoe.launch.run_jobs import state_of

    entries = jobs_of(run)
    lines = [f"{len(entries) - SHOWN} older jobs"] if len(entries) > SHOWN else []
    return lines + [_job_line(entry, state_of(run, entry)) for entry in entries[-SHOWN:]]


def _job_line(entry: JobEntry, state: JobState) -> str:
    where = f" on {state.nodes}" if state.nodes else ""
    why = f" ({state.reason})" if state.reason and state.reason != "None" else ""
    kind = "process" if entry.kind == "local" else "job"
    return f"{kind} {entry.job_id} ({entry.why}): {state.state}{where}{why}"


def _attempt_lines(run: RunDirectory) -> list[str]:
    if not run.run_json.exists():
        return []
    attempts: list[dict[str, Any]] = files.read_json(run.run_json)["attempts"]
    lines = [f"{len(attempts) - SHOWN} older attempts"] if len(attempts) > SHOWN else []
    for attempt in attempts[-SHOWN:]:
        number = attempt["number"]
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt["began"]))
        job = f", job {attempt['job']}" if attempt.get("job") else ""
        lines.append(f"attempt {number} began {began} on {attempt.get('host', '?')}{job}{_end(run, number)}")
    return lines


def _end(run: RunDirectory, attempt: int) -> str:
    code = attempt_code(run, attempt)
    return "" if code is None else f", ended with code {code}"


def _element_state(job_id: str, kind: str, run: Path, states: Mapping[str, JobState]) -> str:
    """Of what Slurm has forgotten, how the last attempt ended."""
    if not job_id:
        return "NOT SUBMITTED"
    state = states[job_id].state if kind == "slurm" else GONE
    if state != GONE:
        return state
    directory = RunDirectory(run)
    attempts = files.read_json(directory.run_json)["attempts"]
    ended = _end(directory, len(attempts) - 1).removeprefix(", ") if attempts else ""
    return ended or ("begun" if attempts else GONE)
