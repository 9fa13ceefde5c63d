"""The handle of a run and its jobs: known by its run directory alone, from any process on any login node.

    job = RunJob.of("runs/quickstart/first");  job.state;  job.wait(60);  job.result();  job.cancel();  job.logs()

A run may have several jobs (resumed, a chain): the first that has not ended counts, else the last; `wait` and
`result` follow them to the end of the run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pekoe.launch.attempts import RunDirectoryError, check_is_run
from pekoe.launch.claim import has_left
from pekoe.launch.job_states import GONE, LIVING, UNKNOWN, JobState, read_state
from pekoe.launch.run_errors import JobEndedError
from pekoe.launch.run_result import RunResult, code_of_job
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.submitted_jobs import SCRIPT, JobEntry, jobs_of, newest_job
from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    from pekoe.launch.slurm import LocalRunJob, SubmittedJob

POLL_SECONDS = 0.5
NEWEST = 3
"""Jobs of a run that are asked for: earlier ones have ended."""
FOLLOW_SECONDS = 5.0
"""How late it may be noted that a job which ended without a result is not the last."""


@dataclass(frozen=True)
class RunJob:
    """A run and its jobs."""

    run: RunDirectory
    job_id: str
    """Of the job that the handle was made for: the one just submitted, or the one that counted when it was rebuilt.
    Slurm's, or the process id of a local job."""

    @classmethod
    def of(cls, run: RunDirectory | Path | str) -> RunJob:
        """RunDirectoryError for a folder that is no run, or a run that never was a job."""
        directory = run if isinstance(run, RunDirectory) else RunDirectory(Path(run).absolute())
        check_is_run(directory)
        if newest_job(directory) is None:
            raise RunDirectoryError(
                f"{directory.path} has had no job; `pekoe resume {directory.path}` submits its next one"
            )
        return cls(directory, current_job(directory)[0].job_id)

    @property
    def entry(self) -> JobEntry:
        """The job that counts now."""
        return current_job(self.run)[0]

    @property
    def job(self) -> SubmittedJob | LocalRunJob:
        """submitit's handle of the job that counts now."""
        return _handle(self.run, self.entry)

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, OUT_OF_MEMORY, TIMEOUT, NODE_FAIL, PREEMPTED, CANCELLED, …"""
        return current_job(self.run)[1].state

    @property
    def has_ended(self) -> bool:
        """Whether no job of the run waits or runs."""
        return current_job(self.run)[1].has_ended

    def wait(self, timeout: float | None = None) -> bool:
        """Until the run's last job has ended; False when `timeout` seconds were over before."""
        deadline = None if timeout is None else time.monotonic() + timeout
        handle = _handle(self.run, jobs_of(self.run)[-1])
        while True:
            if handle.done():
                other = self._other_than(handle)
                if other is None:
                    return True
                handle = _handle(self.run, other)
                continue
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)

    def result(self, timeout: float | None = None) -> RunResult:
        """Waits for the run's end. RunFailedError, RunStoppedError, or JobEndedError (by state) when it is not a good
        one; TimeoutError after `timeout` seconds."""
        if not self.wait(timeout):
            raise TimeoutError(
                f"job {self.entry.job_id} of {self.run.path} has not ended after {timeout:.0f} s: {self.state}"
            )
        return _handle(self.run, jobs_of(self.run)[-1]).result()

    def cancel(self, now: bool = False) -> str:
        """Stops the run with a checkpoint, then ends its jobs; `now` ends them without. Returns what was done."""
        from pekoe.launch.cancel import cancel

        return cancel(self.run, now=now)

    def logs(self) -> list[Path]:
        """What its jobs printed, oldest first, then the logs of the ranks of the newest attempt."""
        outputs = [entry.output for entry in jobs_of(self.run) if entry.output is not None]
        attempts = sorted((path for path in self.run.path.glob("logs/*") if path.name.isdigit()), key=_number)
        ranks = sorted(attempts[-1].glob("rank-*.log"), key=_number) if attempts else []
        return [path for path in (*outputs, *ranks) if path.exists()]

    def _other_than(self, handle: Any) -> JobEntry | None:
        """The last job, if it is another than this one, which has ended: the next of a chain; or, when this one was
        the next and was not needed, the one before. A job that left a result has no next."""
        deadline = time.monotonic() + (0.0 if handle.paths.result_pickle.exists() else FOLLOW_SECONDS)
        while True:
            last = jobs_of(self.run)[-1]
            if last.job_id != handle.job_id:
                return last
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_SECONDS)


def state_of(run: RunDirectory, entry: JobEntry) -> JobState:
    """What a job of the run does now; of one that Slurm has forgotten, what its result says. A job of somebody's own
    that goes on when the run has left it (salloc) has ended, as far as the run goes."""
    handle = _handle(run, entry)
    if entry.kind == "local":
        return JobState(handle.state)
    try:
        state = read_state(entry.job_id)
    except SlurmError as error:
        return JobState(UNKNOWN, reason=str(error))
    if entry.why == SCRIPT and (state.state == GONE or (state.state in LIVING and has_left(run, entry.job_id))):
        code = code_of_job(run, entry.job_id)
        return state if code is None else JobState("FAILED" if code else "COMPLETED")
    if state.state == GONE and handle.paths.result_pickle.exists():
        return JobState("COMPLETED" if handle.exception() is None else "FAILED")
    return state


def current_job(run: RunDirectory) -> tuple[JobEntry, JobState]:
    """The first job that has not ended, else the last; and its state."""
    pairs = [(entry, state_of(run, entry)) for entry in jobs_of(run)[-NEWEST:]]
    return next((pair for pair in pairs if not pair[1].has_ended), pairs[-1])


def _handle(run: RunDirectory, entry: JobEntry) -> SubmittedJob | LocalRunJob:
    from pekoe.launch.slurm import job_of

    return job_of(run, entry)


def _number(path: Path) -> int:
    return int("".join(letter for letter in path.stem if letter.isdigit()) or 0)


__all__ = ["JobEndedError", "RunJob", "RunResult", "current_job", "state_of"]
