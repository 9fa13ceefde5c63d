"""Submits runs with submitit: its pickles, handles and `.result()`, our script.

    submit ─► pickle of (run_submitted, RUN) ─► sbatch of our script ─► batch shell, exec ─► submitit's `_submit`
              ─► run_submitted ─► the driver, in this process ─► RunResult or an error ─► result pickle ─► `.result()`

What submitit would do by itself does not happen here: its script (srun around the function), its requeue on a signal
(the driver has the signals, and requeues as cluster.continue_by says), its watching of sacct alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped]
from submitit.core.core import InfoWatcher, Job
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, UncompletedJobError
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from pekoe.launch.claim import has_left, is_mine
from pekoe.launch.job_states import ENDED, GONE, LIVING, TAKEN, UNKNOWN, read_state, read_states
from pekoe.launch.run_errors import (
    UNHEARD,
    WRONG_CONFIGURATION,
    JobEndedError,
    RunFailedError,
    RunStoppedError,
    run_failed,
)
from pekoe.launch.run_result import RunResult, code_of_job, conclude
from pekoe.launch.sbatch import submit_script
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.stop_signals import EXIT_CONFIGURATION, EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from pekoe.launch.submitted_jobs import SCRIPT, JobEntry, submissions_of
from pekoe.launch.terminal import say
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

WATCH_SECONDS = 30.0
"""At most so long between two looks at the queue; results are looked for each second."""
RESULT_SECONDS = 5.0
"""How late the result may be seen after the end of the job."""
SETTLING = frozenset({"PREEMPTED", "NODE_FAIL", GONE})
"""The queue may say so in passing, just before it puts the job back; believed when it still says so later."""
SETTLE_SECONDS = 3.0
NO_LIMIT_MINUTES = 60 * 24 * 365
LOCAL_MODULE = "submitit.local._local"


def run_submitted(run_path: str, overrides: Sequence[str] = (), after: int | None = None) -> RunResult:
    """What a submitted job runs, in the main thread of its batch shell: the driver of the run, from here to its end.

    RunFailedError and RunStoppedError are the job's result when it did not end well. Nothing is its result when the
    run goes on elsewhere: requeued, in the next job of a chain, or under another driver. `after` is a process on this
    machine that comes first.
    """
    from pekoe.launch.job import run_job

    _forget_earlier_result()
    sys.excepthook = _leave_with_its_code
    while after is not None and _is_local_job(after):
        time.sleep(1.0)
    run = RunDirectory(Path(run_path))
    try:
        code = run_job(run, overrides)
    except ValueError as error:
        raise RunFailedError(f"{run.path}: {WRONG_CONFIGURATION}: {error}", EXIT_CONFIGURATION) from error
    if not is_mine(run):
        _leave(EXIT_DONE)
    if code == EXIT_REQUEUE and _is_continued(run):
        _leave(code)
    return conclude(run, code)


def _forget_earlier_result() -> None:
    """Of an earlier start of a job that was requeued, and the half of one."""
    result = JobEnvironment().paths.result_pickle
    for path in (result, result.with_suffix(f"{result.suffix}.save_tmp")):
        files.remove(path)


def _is_continued(run: RunDirectory) -> bool:
    """Whether the job goes back into the queue, or another job waits there for this run."""
    mine = JobEnvironment().job_id
    newest = next(iter(reversed(submissions_of(run))), None)
    if newest is not None and newest.job_id != mine:
        return True
    if newest is None or newest.kind != "slurm":
        return False
    return read_state(mine).state not in ("RUNNING", *ENDED)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_with_its_code(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An uncaught error ends the job with the run's exit code, where it has one."""
    if isinstance(error, (RunFailedError, RunStoppedError)):
        say(str(error))
    else:
        sys.__excepthook__(kind, error, trace)
    _leave(int(getattr(error, "exit_code", EXIT_FAILURE)))


class StateWatcher(InfoWatcher):
    """Asks squeue, and sacct only for what squeue has forgotten."""

    def __init__(self, delay_s: float = WATCH_SECONDS) -> None:
        super().__init__(delay_s=int(delay_s))
        self._passing: dict[str, tuple[str, float]] = {}
        """Job -> a state that may be passing, and since when it is seen."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """As squeue says it; UNKNOWN while it gives no answer."""
        return self.get_info(job_id, mode=mode).get("State") or UNKNOWN

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """SUSPENDED, REQUEUE_HOLD, COMPLETING and the like are not the end."""
        state = self.get_state(job_id, mode=mode)
        if state not in SETTLING:
            self._passing.pop(job_id, None)
            return state in ENDED
        seen, since = self._passing.get(job_id, ("", 0.0))
        if seen != state:
            since = time.monotonic()
            self._passing[job_id] = (state, since)
        return time.monotonic() - since >= SETTLE_SECONDS

    def update(self) -> None:
        """One command for all jobs that are not at their end; without an answer, what is known stays."""
        waiting = self._registered - self._finished
        if not waiting:
            return
        self._num_calls += 1
        self._last_status_check = time.time()
        with contextlib.suppress(SlurmError):
            for job, found in read_states(waiting).items():
                self._info_dict[job] = {"State": found.state, "NodeList": found.nodes, "Reason": found.reason}
        self._finished |= {job for job in waiting if self.is_done(job, mode="cache")}


class _TypedEnd(Job[RunResult]):
    """A job whose errors tell the ways in which a run can end apart."""

    def exception(self) -> Exception | None:  # type: ignore[override]
        """Waits for the end; RunFailedError, RunStoppedError, JobEndedError, or None after a good one."""
        self.wait()
        try:
            outcome, value = self._get_outcome_and_result()
        except UncompletedJobError:
            return JobEndedError(self.job_id, self.state, str(self.submission().args[0]))
        if outcome == "success":
            return None
        error = error_in(str(value))
        if self.state in TAKEN and UNHEARD in str(error):
            # The job went while its driver was starting the ranks: Slurm's word says why, the driver's does not.
            return JobEndedError(self.job_id, self.state, str(self.submission().args[0]))
        return error

    def results(self) -> list[RunResult]:
        """One result; raises what `exception` returns."""
        error = self.exception()
        if error is not None:
            raise error
        return [self._get_outcome_and_result()[1]]


class SubmittedJob(_TypedEnd, SlurmJob[RunResult]):
    """A job, or an element of an array, of Slurm."""

    watcher = StateWatcher()  # type: ignore[assignment]
    _results_timeout_s = RESULT_SECONDS  # type: ignore[assignment]


class ScriptJob(SubmittedJob):
    """A job that somebody's own script was (sbatch, salloc): it has no pickles, its result is read from the run."""

    def __init__(self, run: RunDirectory, job_id: str) -> None:
        super().__init__(run.slurm, job_id)
        self._run = run

    def done(self, force_check: bool = False) -> bool:
        return super().done(force_check) or self.has_left

    @property
    def has_left(self) -> bool:
        """Whether its driver has ended in order, in a job that goes on: the shell of a person, or a longer script."""
        return self.state in LIVING and has_left(self._run, self.job_id)

    def exception(self) -> Exception | None:  # type: ignore[override]
        self.wait()
        try:
            self._get_outcome_and_result()
        except UncompletedJobError:
            return JobEndedError(self.job_id, self.state, str(self._run.path))
        except (RunFailedError, RunStoppedError) as error:
            return error
        return None

    def _get_outcome_and_result(self) -> tuple[str, RunResult]:
        code = code_of_job(self._run, self.job_id)
        if code is None:
            raise UncompletedJobError(f"job {self.job_id} of {self._run.path} has left no word of its end")
        return "success", conclude(self._run, code)


class LocalRunJob(_TypedEnd, LocalJob[RunResult]):
    """A job that is a process of this machine; its id is the process'. Can be found again by it."""

    _results_timeout_s = RESULT_SECONDS  # type: ignore[assignment]

    def done(self, force_check: bool = False) -> bool:
        return self.state != "RUNNING"

    @property
    def state(self) -> str:
        if self.paths.result_pickle.exists():
            return "COMPLETED" if self._get_outcome_and_result()[0] == "success" else "FAILED"
        if self._process is not None:
            return "RUNNING" if self._process.poll() is None else "FAILED"
        return "RUNNING" if _is_local_job(int(self.job_id)) else "FAILED"


def _is_local_job(pid: int) -> bool:
    """Whether the process is one that `ProcessExecutor` started, and lives."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and LOCAL_MODULE in process.cmdline()
    except psutil.Error:
        return False


class ScriptExecutor(SlurmExecutor):
    """Submits functions under a script of ours; several at once are one array, element by element."""

    job_class = SubmittedJob

    def __init__(self, folder: Path, script: Callable[[int | None], str], flags: Sequence[str] = ()) -> None:
        """`script(number of elements, or None for a job)` is the text for sbatch; `flags` are more of sbatch's."""
        super().__init__(folder)
        self._script = script
        self._flags = flags

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        files.make_folder(self.folder)
        name = uuid.uuid4().hex
        pickles = [self.folder / f"{name}-{index}.pkl" for index in range(len(delayed_submissions))]
        script = self.folder / f"{name}.sh"
        num_elements = None if len(pickles) == 1 else len(pickles)
        try:
            for delayed, path in zip(delayed_submissions, pickles, strict=True):
                delayed.set_timeout(0, 0)
                delayed.dump(path)
            files.write_bytes(script, self._script(num_elements).encode())
            job_id = submit_script(script, self._flags)
        except BaseException:
            for path in (script, *pickles):
                files.remove(path)
            raise
        ids = [job_id] if num_elements is None else [f"{job_id}_{index}" for index in range(num_elements)]
        jobs: list[Job[Any]] = [SubmittedJob(self.folder, one) for one in ids]
        jobs[0].paths.move_temporary_file(script, "submission_file")
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs


class ProcessExecutor(LocalExecutor):
    """Runs functions in processes of this machine that outlive this one; for machines without Slurm."""

    job_class = LocalRunJob

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        """`variables` are added to the environment."""
        files.make_folder(folder)
        super().__init__(folder)
        self._variables = variables

    def _submit_command(self, command: str) -> LocalJob[Any]:
        settings = {
            "SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_COMMAND": command, "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(NO_LIMIT_MINUTES * 60), "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_STDERR_TO_STDOUT": "1", "SUBMITIT_LOCAL_WITH_SHELL": "",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", LOCAL_MODULE, str(self.folder)], start_new_session=True,
            env={**os.environ, **self._variables, **settings}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return LocalRunJob(self.folder, str(process.pid), process=process)


def job_of(run: RunDirectory, entry: JobEntry) -> SubmittedJob | LocalRunJob:
    """The handle of a job that began earlier, maybe by another process."""
    kind, folder, job_id = entry.kind, Path(entry.folder), entry.job_id
    if entry.why == SCRIPT:
        return ScriptJob(run, job_id)
    return SubmittedJob(folder, job_id) if kind == "slurm" else LocalRunJob(folder, job_id)


def error_in(trace: str) -> Exception:
    """The error that a trace ends with."""
    for make, name in ((run_failed, RunFailedError.__name__), (RunStoppedError, RunStoppedError.__name__)):
        _, found, text = trace.rpartition(f"{name}: ")
        if found:
            return make(text.strip())
    return RunFailedError(f"the job failed before the run began:\n{trace.strip()}")
