"""How a run goes on after the end of its job: `cluster.continue_by`.

requeue   the same job goes back into the queue when an attempt stopped with a checkpoint
chain     the next job waits in the queue from the start of each attempt, and is cancelled when the run is over
none      a person continues it

Never Slurm's requeue and ours both: what Slurm itself puts back (a lost node, a preemption that it ended) is left
alone. Every word with Slurm has a time limit; without an answer the attempt ends as it would with `none`.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from pekoe.launch import slurm_commands
from pekoe.launch.environment import Facts
from pekoe.launch.slurm_commands import SlurmError, ask, job_facts
from pekoe.launch.submitted_jobs import forget_job
from pekoe.launch.terminal import say
from pekoe.pipeline import files
from pekoe.pipeline.config.durations import duration_seconds
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.run_directory import RunDirectory

CANCEL_SECONDS = 3.0
END_SECONDS = 60.0
"""How long a requeued job may take to be ended by Slurm."""


def attempts_by_itself(run: RunDirectory) -> int:
    """Attempts since a person last started the run, that one included; 0 before the first."""
    count = 0
    for entry in reversed(files.read_json(run.run_json)["attempts"]):
        count += 1
        if not entry.get("automatic", False):
            break
    return count


@dataclass
class Continuation:
    """Of one job."""

    run: RunDirectory
    config: RunConfig
    facts: Facts
    next_job: str | None = None
    """Of a chain: waits for the end of this one."""

    @property
    def how(self) -> str:
        """`none` outside Slurm jobs."""
        return self.config.cluster.continue_by if self.facts.job_id is not None else "none"

    @property
    def may_go_on(self) -> bool:
        """Whether one more attempt is allowed by `cluster.max_attempts`."""
        return attempts_by_itself(self.run) < self.config.cluster.max_attempts

    def begin(self) -> None:
        """At the start of a job's first attempt: of a chain, the next job is put into the queue."""
        if self.how != "chain" or self.next_job is not None:
            return
        if not self.may_go_on:
            say(f"cluster.max_attempts: {self.config.cluster.max_attempts}: this is the last job of the chain")
            return
        from pekoe.launch.submit import resume

        assert self.facts.job_id is not None
        try:
            self.next_job = resume(self.run, self._same_request(), after=self.facts.job_id).job_id
        except (SlurmError, ValueError) as error:
            say(f"the next job of the chain could not be submitted, this one is the last: {error}")
            return
        say(f"job {self.next_job} waits for the end of this one", fresh=False)

    def drop(self) -> None:
        """The run is over: no further job."""
        if self.next_job is None:
            return
        try:
            slurm_commands.cancel(self.next_job)
        except SlurmError as error:
            say(f"job {self.next_job} waits for the end of this one and is not needed any more; end it: {error}")
            return
        forget_job(self.run, self.next_job)
        say(f"job {self.next_job}, which waited for the end of this one, is cancelled", fresh=False)
        self.next_job = None

    def end_if_cancelled(self) -> None:
        """SIGTERM has come: a chain whose job somebody cancels is over, as far as Slurm tells so in time."""
        end = time.monotonic() + CANCEL_SECONDS
        while self.next_job is not None and time.monotonic() < end:
            if self._is_cancelled():
                self.drop()
            time.sleep(0.2)

    def _is_cancelled(self) -> bool:
        """By the accounts; where they cannot be asked: the job ends before its time, for no reason that Slurm names
        (it does name TimeLimit, NodeDown and the like), and is not put back."""
        assert self.facts.job_id is not None
        command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={self.facts.job_id}"]
        with contextlib.suppress(SlurmError):
            state = ask([*command, "--format=State"], CANCEL_SECONDS).split()
            if state and state[0] not in ("RUNNING", "COMPLETING"):
                return state[0] == "CANCELLED"
        with contextlib.suppress(SlurmError):
            found = job_facts(self.facts.job_id)
            restarted = int(found.get("Restarts", "0")) != self.facts.restart_count
            return found.get("JobState") in ("COMPLETING", "CANCELLED") and found["Reason"] == "None" and not restarted
        return False

    def requeue(self) -> bool:
        """Puts this job back into the queue, after which Slurm ends it; False when that is not possible."""
        job = self.facts.job_id
        assert job is not None
        try:
            found = job_facts(job)
        except SlurmError as error:
            say(f"not requeued: {error}")
            return False
        if found.get("JobState") != "RUNNING" or int(found.get("Restarts", "0")) != self.facts.restart_count:
            say(f"not requeued: Slurm has the job as {found.get('JobState')}, restart {found.get('Restarts')}")
            return False
        try:
            slurm_commands.requeue(job)
        except SlurmError as error:
            say(f"not requeued: {error}; continue with `pekoe resume {self.run.path}`")
            return False
        say(f"job {job} is back in the queue", fresh=False)
        return True

    def _same_request(self) -> list[str]:
        """What this job was given on sbatch's command line, not by the configuration: the next one asks for it, too."""
        assert self.facts.job_id is not None
        slurm = self.config.cluster.slurm
        try:
            found = job_facts(self.facts.job_id)
        except SlurmError:
            return []
        overrides = [
            f"cluster.slurm.{key}={found[name]}"
            for key, name in (("partition", "Partition"), ("account", "Account"), ("qos", "QOS"))
            if getattr(slurm, key) is None and found.get(name, "(null)") not in ("(null)", "N/A", "")
        ]
        limit, own = found.get("TimeLimit", ""), self.config.cluster.time_limit
        if duration_seconds(limit) is not None and (own is None or duration_seconds(own) is None):
            overrides.append(f"cluster.time_limit={limit}")
        return overrides


def wait_for_end() -> None:
    """After a requeue: Slurm ends this process; not for ever, should it not."""
    time.sleep(END_SECONDS)
