"""The driver of a run: what a job's batch shell becomes, and what `pekoe run` is inside an allocation.

    claim the run ─► [chain: the next job] ─► fence ─► wait until the old ranks are silent ─► begin the attempt
        ─► start the world, watch it (`step_world`, outside of jobs `local`) ─► its code
        ─► restart in place │ requeue │ the end

Codes: 0 done, 75 stopped and to be continued, 78 configuration, 1 failure.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pekoe.launch import environment
from pekoe.launch.attempts import Attempt, RunDirectoryError, begin_next, note_end, prepare_run, run_directory
from pekoe.launch.checked_config import load_checked
from pekoe.launch.claim import claim, newest_owner
from pekoe.launch.continuation import Continuation, wait_for_end
from pekoe.launch.early_stop import StoppedEarly, stop_signals_raise
from pekoe.launch.environment import Facts
from pekoe.launch.error_record import ErrorRecord, read_record, write_record
from pekoe.launch.fence import newest_attempt, raise_fence, wait_until_silent
from pekoe.launch.job_nodes import NodesLackingError, ill_nodes, pick_nodes
from pekoe.launch.job_times import time_variables
from pekoe.launch.local import LocalWorld, run_local_world
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.step_world import Limits, StepStart, StepWorld
from pekoe.launch.stop_signals import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from pekoe.launch.submitted_jobs import jobs_of
from pekoe.launch.terminal import say
from pekoe.launch.world_end import noted_code
from pekoe.pipeline import files
from pekoe.pipeline.config.snapshot import read_run_config
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import NAME as CHECKPOINT_NAME

if TYPE_CHECKING:
    from pekoe.launch.placement import Placement
    from pekoe.pipeline.config.run import RunConfig

SILENCE_SECONDS = 120.0
"""How long a driver waits for the ranks of an attempt that it has fenced off."""
STOP_SECONDS = 30.0
"""On top of cluster.grace_seconds and cluster.abort_seconds: the end of a world that was told to stop."""


@dataclass(frozen=True)
class WorldStart:
    """A world to start, of any program."""

    run: RunDirectory
    """Where its logs, heartbeats and errors go, and where its code lies."""
    attempt: int
    program: tuple[str, ...]
    """Arguments after `python` of every rank."""
    num_ranks: int
    config: RunConfig
    placement: Placement
    nodes: tuple[str, ...] = ()
    """Names of the nodes to use; empty = the first of the allocation."""


@dataclass(frozen=True)
class WorldOutcome:
    """How a world has ended."""

    code: int
    stopped: bool = False
    """A stop signal, or the user's Ctrl-C, had come."""


def start_world(start: WorldStart) -> int:
    """Starts the world as `cluster.launcher` says and waits for its end; returns the exit code. Main thread only.

    ValueError when the configuration, the machine or the allocation do not fit.
    """
    return run_world(start, environment.read(os.environ)).code


def run_world(start: WorldStart, facts: Facts, on_terminated: Callable[[], None] = lambda: None) -> WorldOutcome:
    """As `start_world`, and tells more of the end. `on_terminated` is called when the job itself is being ended."""
    from pekoe.launch.step_command import Step, choose_launcher, choose_mpi, step_command

    config, run = start.config, start.run
    launcher = choose_launcher(config, facts, start.num_ranks)
    if launcher == "join":
        raise RunDirectoryError(
            "this process is a rank of a world already, it cannot start another one; start it outside of srun and "
            "mpiexec"
        )
    if launcher == "local":
        code = run_local_world(LocalWorld(run, start.attempt, start.num_ranks, start.program))
        record = read_record(run, start.attempt)
        return WorldOutcome(code, stopped=code == EXIT_REQUEUE or (record is not None and record.rank < 0))
    assert facts.job_id is not None
    nodes = start.nodes or first_nodes(config, start.placement, facts)
    mpi = choose_mpi(config, launcher)
    cluster = config.cluster
    world = StepWorld(
        StepStart(
            run=run, attempt=start.attempt, launcher=launcher, job=facts.job_id,
            command=tuple(step_command(Step(start.program, start.num_ranks, nodes), config, start.placement, mpi)),
            limits=Limits(
                start=cluster.setup_seconds, failed=cluster.abort_seconds + 3.0,
                stop=cluster.grace_seconds + cluster.abort_seconds + STOP_SECONDS,
            ),
            variables=time_variables(facts), on_terminated=on_terminated,
        )
    )  # fmt: skip
    return WorldOutcome(world.wait(), world.stopped)


def components_of(facts: Facts) -> tuple[tuple[str, ...], ...]:
    """Node names of each component of the allocation; an ordinary job has one."""
    return facts.het_groups or (facts.job_nodes,)


def first_nodes(config: RunConfig, placement: Placement, facts: Facts) -> tuple[str, ...]:
    """Those that a world uses of the allocation. ValueError when the allocation does not fit it."""
    from pekoe.launch.batch_script import allocation_problem
    from pekoe.launch.node_layout import nodes_needed

    components = components_of(facts)
    problem = allocation_problem(config, placement, len(components[0]), facts.cores_on_node, len(components))
    if problem:
        raise RunDirectoryError(problem)
    return pick_nodes(nodes_needed(config, placement), components)


def run_of_job(config: RunConfig, facts: Facts) -> RunDirectory:
    """The run directory of a configuration: prepared, or, in a job that Slurm has started again or that continues a
    chain, the one that it began. RunDirectoryError when it holds another run."""
    run = run_directory(config)
    if facts.job_id is not None and run.run_json.exists():
        owner = newest_owner(run)
        known = {entry.job_id for entry in jobs_of(run)} | ({owner.job_id} if owner is not None else set())
        if facts.job_id in known:
            return run
    return prepare_run(config)


def run_job(run: RunDirectory, overrides: Sequence[str] = ()) -> int:
    """Drives the run until it is over, is to be continued by another job, or has failed; returns the exit code.

    0 at once where another driver has the run. ValueError lists what is wrong before anything is started.
    """
    facts = environment.read(os.environ)
    mine = claim(run, facts.job_id, facts.restart_count)
    if mine is None:
        return EXIT_DONE
    try:
        return _Driver(run, overrides, facts).drive()
    finally:
        mine.release()


class _Driver:
    """One job's work on a run."""

    def __init__(self, run: RunDirectory, overrides: Sequence[str], facts: Facts) -> None:
        self.run = run
        self.overrides = list(overrides)
        self.facts = facts
        self.config, self.placement = load_checked(read_run_config(run), overrides, quiet=False)
        self.continuation = Continuation(run, self.config, facts)
        self.restarts_left = self.config.cluster.restart_in_place
        self.restarted = False
        self.nodes: tuple[str, ...] = ()
        self.begun: Attempt | None = None
        """The attempt whose world is not there yet."""
        self.last_failure: tuple[tuple[int, int], tuple[str, ...]] | None = None

    def drive(self) -> int:
        """The exit code."""
        if not self._may_begin():
            return EXIT_FAILURE
        with stop_signals_raise():
            try:
                return self._run_attempts()
            except StoppedEarly as stop:
                say(str(stop))
                return self._conclude_early(stop.number)

    def _conclude_early(self, number: int) -> int:
        """A stop while there was no world: as one after a world that stopped in order."""
        if self.begun is not None and noted_code(self.run, self.begun.number) is None:
            files.make_folder(self.run.logs(self.begun.number))
            note_end(self.begun, EXIT_REQUEUE, number)
        self.continuation.begin()
        if number == signal.SIGTERM:
            self.continuation.end_if_cancelled()
        return self._conclude(self.begun or Attempt(self.run, 0), WorldOutcome(EXIT_REQUEUE, stopped=True))

    def _run_attempts(self) -> int:
        self.nodes = self._pick()
        while True:
            attempt = self._begin()
            self.continuation.begin()
            program = ("-m", "pekoe.launch.rank", str(self.run.path), str(attempt.number))
            size = self.placement.world_size
            start = WorldStart(self.run, attempt.number, program, size, self.config, self.placement, self.nodes)
            outcome = run_world(start, self.facts, self.continuation.end_if_cancelled)
            self.begun = None
            if not self._restarts(attempt, outcome):
                return self._conclude(attempt, outcome)

    def _is_automatic(self) -> bool:
        """Whether no person started this job or this attempt of it."""
        chained = any(entry.job_id == self.facts.job_id and entry.why == "chain" for entry in jobs_of(self.run))
        return self.restarted or self.facts.restart_count > 0 or chained

    def _may_begin(self) -> bool:
        if not self._is_automatic() or self.continuation.may_go_on:
            return True
        say(self._limit_text())
        return False

    def _limit_text(self) -> str:
        limit = self.config.cluster.max_attempts
        return (
            f"cluster.max_attempts: {limit} attempts have begun by themselves since the run was last started; look at "
            f"`pekoe doctor {self.run.path}`, then continue with `pekoe resume {self.run.path}`"
        )

    def _pick(self) -> tuple[str, ...]:
        """Well nodes of the allocation; () outside of jobs. NodesLackingError."""
        from pekoe.launch.node_layout import nodes_needed

        if not self.facts.in_allocation:
            return ()
        if not self.restarted and self.config.cluster.spare_nodes == 0:
            return first_nodes(self.config, self.placement, self.facts)
        return pick_nodes(nodes_needed(self.config, self.placement), components_of(self.facts), self._ill())

    def _ill(self) -> dict[str, str]:
        names = [name for component in components_of(self.facts) for name in component]
        try:
            return ill_nodes(names)
        except SlurmError as error:
            say(f"which nodes are well is not known: {error}")
            return {}

    def _begin(self) -> Attempt:
        """No earlier attempt may write any more, and none lives, when the next one begins."""
        raise_fence(self.run)
        ended = set(self.facts.job_nodes) - set(self._ill()) if self.restarted else set()
        wait_until_silent(self.run, SILENCE_SECONDS, ended, say)
        notes = {"job": self.facts.job_id, "restarts": self.facts.restart_count, "automatic": self._is_automatic()}
        launcher = self.config.cluster.launcher if self.facts.in_allocation else "mpiexec"
        attempt = self.begun = begin_next(self.run, self.config, launcher, self.overrides, notes)
        print(f"pekoe: run directory {self.run.path}, attempt {attempt.number}, {self.placement}", flush=True)
        return attempt

    def _restarts(self, attempt: Attempt, outcome: WorldOutcome) -> bool:
        """Whether the world is started again right here. A failure that came again without a new checkpoint in between,
        on the same nodes, would come for ever."""
        if outcome.code != EXIT_FAILURE or outcome.stopped or self.restarts_left == 0:
            return False
        if newest_attempt(self.run) > attempt.number:
            return False
        ill = self._ill() if self.facts.in_allocation else {}
        failure = (newest_checkpoint(self.run), tuple(ill))
        if failure == self.last_failure:
            say("no restart: the attempt failed again without a new checkpoint since the last restart")
            return False
        if not self.continuation.may_go_on:
            say(self._limit_text())
            return False
        self.last_failure = failure
        self.restarts_left -= 1
        self.restarted = True
        try:
            self.nodes = self._pick()
        except NodesLackingError as error:
            say(f"no restart in place: {error}")
            return False
        lost = f" without {', '.join(f'{name} ({state})' for name, state in ill.items())}" if ill else ""
        say(f"the world starts again in place{lost}; {self.restarts_left} more such restart(s)")
        return True

    def _conclude(self, attempt: Attempt, outcome: WorldOutcome) -> int:
        code, how = outcome.code, self.continuation.how
        if code == EXIT_FAILURE and not outcome.stopped and how != "none" and self._ill():
            say("a node of the job is ill: the run goes on elsewhere")
            code = EXIT_REQUEUE
        if code != EXIT_REQUEUE:
            self.continuation.drop()
            if code == EXIT_FAILURE:
                say(f"logs are in {self.run.logs(attempt.number)}", fresh=False)
            return code
        if how == "none" or (how == "chain" and self.continuation.next_job is None):
            command = "run --resume" if self.facts.job_id is None else "resume"
            say(f"stopped; continue with `pekoe {command} {self.run.path}`")
        if how != "none" and not self.continuation.may_go_on:
            record = ErrorRecord(attempt.number, -1, self.facts.host, "", "ended", 0.0, self._limit_text())
            write_record(self.run, record)
            say(record.sentence())
            return EXIT_FAILURE
        if how == "requeue" and self.continuation.requeue():
            wait_for_end()
        return code


def newest_checkpoint(run: RunDirectory) -> tuple[int, int]:
    """(step, save) of the newest complete one; (-1, 0) if there is none."""
    names = [CHECKPOINT_NAME.fullmatch(path.name) for path in run.checkpoints.glob("step-*")]
    return max(((int(found[1]), int(found[2] or 0)) for found in names if found), default=(-1, 0))
