"""How a run stands at the end of a job, from its files."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.launch.error_record import read_record
from pekoe.launch.run_errors import WRONG_CONFIGURATION, RunFailedError, RunStoppedError
from pekoe.launch.stop_signals import EXIT_CONFIGURATION, EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from pekoe.launch.world_end import noted_code
from pekoe.pipeline import files
from pekoe.pipeline.observe.metrics import read_metrics
from pekoe.pipeline.run_directory import RunDirectory


@dataclass(frozen=True)
class RunResult:
    """A run that has come to its end."""

    run: str
    """The run directory."""
    attempt: int
    """The last one."""
    code: int
    outcome: str
    """`done`: the only one that is no error."""
    steps: int
    """Training steps that are done."""


def conclude(run: RunDirectory, code: int) -> RunResult:
    """The result of a run whose last attempt ended with `code`. RunStoppedError for 75, RunFailedError for all that is
    not 0."""
    attempt = last_attempt(run)
    if code == EXIT_DONE:
        return RunResult(str(run.path), attempt, code, "done", num_steps(run))
    if code == EXIT_REQUEUE:
        raise RunStoppedError(
            f"{run.path} was stopped after step {num_steps(run)}, with a checkpoint; "
            f"continue it with `pekoe resume {run.path}`"
        )
    kind = WRONG_CONFIGURATION if code == EXIT_CONFIGURATION else f"attempt {attempt} failed"
    raise RunFailedError(f"{run.path}: {kind}: {_sentence(run, attempt, code)}", code)


def attempt_code(run: RunDirectory, attempt: int) -> int | None:
    """The exit code of an attempt that has ended, as far as its files tell: an error record weighs more than the note
    of a head that stopped in order. None for one that ended without a word, or has not."""
    record = read_record(run, attempt)
    if record is None:
        return noted_code(run, attempt)
    return EXIT_CONFIGURATION if record.code == EXIT_CONFIGURATION else EXIT_FAILURE


def code_of_job(run: RunDirectory, job_id: str) -> int | None:
    """Of the last attempt that this job of Slurm began; None if it began none."""
    attempts = files.read_json(run.run_json)["attempts"] if run.run_json.exists() else []
    mine = [int(one["number"]) for one in attempts if one.get("job") == job_id]
    return attempt_code(run, mine[-1]) if mine else None


def last_attempt(run: RunDirectory) -> int:
    """That has begun; -1 before the first."""
    return len(files.read_json(run.run_json)["attempts"]) - 1


def num_steps(run: RunDirectory) -> int:
    """The newest training step, by the ledger, or by the figures of a supervised run, which has none; 0 before the
    first."""
    names = (path.stem.removeprefix("step-") for path in run.ledger.glob("step-*.json"))
    steps = [int(name) for name in names if name.isdigit()] or [line.step for line in read_metrics(run)]
    return max(steps, default=0)


def _sentence(run: RunDirectory, attempt: int, code: int) -> str:
    record = read_record(run, attempt)
    if record is None:
        return f"exit code {code}, no error record; `pekoe logs {run.path}` shows what it said"
    return record.sentence()
