"""How a submitted run can end other than well; each tells what to do next."""

from __future__ import annotations

from pekoe.launch.stop_signals import EXIT_CONFIGURATION, EXIT_FAILURE, EXIT_REQUEUE

ADVICE = {
    "OUT_OF_MEMORY": "a node's memory was too small: raise cluster.slurm.mem, or start fewer ranks on a node",
    "TIMEOUT": "the time limit came before the run had stopped: raise cluster.time_limit or "
    "cluster.slurm.signal_seconds, or let cluster.continue_by continue it; then `pekoe resume {run}`",
    "NODE_FAIL": "a node was lost; `pekoe resume {run}` goes on from the newest checkpoint",
    "PREEMPTED": "a job of higher priority took the nodes; `pekoe resume {run}` goes on from the newest checkpoint",
    "CANCELLED": "somebody cancelled it; `pekoe resume {run}` goes on from the newest checkpoint",
    "DEADLINE": "its deadline passed before it could start or end",
    "BOOT_FAIL": "a node did not boot; `pekoe resume {run}` submits it again",
    "GONE": "Slurm knows it no longer; `pekoe doctor {run}` tells how far the run came",
    "FAILED": "`pekoe logs {run}` shows what it said last",
}
"""By state of the job."""
UNHEARD = "before any rank was heard"
"""In the text of an error of a world that ended before it had begun."""
WRONG_CONFIGURATION = "the configuration is wrong"
"""In the text of an error with code 78, by which it is known again when only its text came through."""


class RunFailedError(RuntimeError):
    """The run failed (code 1) or its configuration was wrong (78); the text is its error record's sentence."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def run_failed(text: str) -> RunFailedError:
    """The error with this text, as it was."""
    return RunFailedError(text, EXIT_CONFIGURATION if f": {WRONG_CONFIGURATION}: " in text else EXIT_FAILURE)


class RunStoppedError(RuntimeError):
    """The run was stopped, with what it has done saved, and nobody continues it."""

    exit_code = EXIT_REQUEUE


class JobEndedError(RuntimeError):
    """The job ended without a word of the run; `state` is Slurm's: OUT_OF_MEMORY, TIMEOUT, NODE_FAIL, PREEMPTED,
    CANCELLED, FAILED, …"""

    def __init__(self, job_id: str, state: str, run: str) -> None:
        advice = ADVICE.get(state, ADVICE["FAILED"]).format(run=run)
        super().__init__(f"job {job_id} of {run} ended as {state} without a result: {advice}")
        self.job_id = job_id
        self.state = state
