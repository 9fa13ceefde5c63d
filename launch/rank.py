"""One rank, from its first line to its exit code: `python -m pekoe.launch.rank RUN ATTEMPT`, or joined by `pekoe run`.

    supervise ─► signals, last words ─► config, roles ─► environment ─► log ─► reward pool, engine nursery
              ─► MPI ─► the run's wiring ─► finalize

Processes (reward pool, engine nursery) start before MPI does; torch is imported by the wiring.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pekoe.launch import environment, rank_environment
from pekoe.launch.attempts import Attempt, RunDirectoryError, attempt_began, note_end
from pekoe.launch.environment import Facts, wrong_size
from pekoe.launch.fence import Fence
from pekoe.launch.rank_state import RankState
from pekoe.launch.stop_request import HeadWatch
from pekoe.launch.stop_signals import EXIT_CONFIGURATION, StopSignals
from pekoe.launch.supervisor import Reports, supervise
from pekoe.pipeline.registry import TASKS
from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    from pekoe.launch.placement import Placement
    from pekoe.launch.rank_environment import RankPlan
    from pekoe.launch.world import World, WorldSettings
    from pekoe.pipeline.config.run import RunConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """Where a rank gets its run from."""

    load: Callable[[], RunConfig]
    """The checked configuration; ValueError with the text for people."""
    attempt: Attempt | None
    """Known when a launcher has begun it; else the head begins it when the world is formed."""
    begin: Callable[[RunConfig], Attempt] | None = None
    """Called by the head of a joined world."""
    place: Callable[[RunConfig], Placement] | None = None
    """Which ranks do what; None = as `allocation` says."""
    wiring: str | None = None
    """Module whose `prepare` and `run` make this kind of run; None = as `task` says."""


def run_rank(origin: Origin) -> NoReturn:
    """Becomes one rank of the world that this process was started in; exits the process."""
    facts = environment.read(os.environ)
    supervise(lambda reports: _live(reports, facts, origin), facts.rank)


def _live(reports: Reports, facts: Facts, origin: Origin) -> int:
    signals = StopSignals()
    signals.install()
    state = RankState(facts.rank, facts.host, reports)
    state.catch_everything()
    rank_environment.raise_open_files()
    if origin.attempt is not None:
        reports.tell(run=str(origin.attempt.run.path), attempt=origin.attempt.number)
    state.start_up.enter("configuration")
    try:
        config = origin.load()
    except ValueError as error:
        if facts.rank == 0:
            print(error, file=sys.stderr, flush=True)
        reports.ended(EXIT_CONFIGURATION)
        return EXIT_CONFIGURATION
    reports.tell(grace=config.cluster.grace_seconds + config.cluster.abort_seconds)
    from pekoe.launch.allocation import place

    placement = (origin.place or place)(config)
    if facts.size != placement.world_size:
        if facts.rank == 0:
            print(f"pekoe: {wrong_size(placement.world_size, facts)}", file=sys.stderr, flush=True)
        reports.ended(EXIT_CONFIGURATION)
        return EXIT_CONFIGURATION
    roles = placement.roles_of(facts.rank)
    state.set_role("+".join(roles))
    if origin.attempt is not None:
        _enter_attempt(state, origin.attempt)
    state.start_up.enter("environment")
    plan = _enter_environment(config, facts, placement)
    from pekoe.launch.world import World

    state.set_phase("preparing")
    wiring = importlib.import_module(origin.wiring or TASKS[config.task].partition(":")[0])
    rollout_engine = placement.rollout.engine if placement.rollout is not None else ""
    prepared = wiring.prepare(config, placement.tasks_of(facts.rank), rollout_engine)
    settings = world_settings(config)
    with World.join(placement.world_size, settings, facts=facts, state=state, signals=signals) as world:
        try:
            attempt = origin.attempt or _begin_together(world, config, origin)
        except RunDirectoryError as error:
            if world.rank == 0:
                print(error, file=sys.stderr, flush=True)
            world.finalize(EXIT_CONFIGURATION)
            return EXIT_CONFIGURATION
        if origin.attempt is None:
            _enter_attempt(state, attempt)
        world.begin_attempt(attempt.run, attempt.number, state.log)
        for note in (*plan.notes, state.start_up.sentence()):
            logger.info(note)
        world.ends_at = world.share(_job_end(config, facts, attempt) if world.rank == 0 else None)
        over = threading.Event()
        if world.rank == 0:
            watch = HeadWatch(Fence(attempt.run, attempt.number), signals)
            world.start("head-watch", lambda: watch.run(over))
        code = int(wiring.run(config, world, placement, attempt.run, prepared, _device_index(config, world, plan)))
        over.set()
        if world.rank == 0:
            note_end(attempt, code, signals.first)
        world.finalize(code)
    return code


def world_settings(config: RunConfig) -> WorldSettings:
    """The times of the `cluster` section."""
    from pekoe.launch.world import WorldSettings

    cluster = config.cluster
    return WorldSettings(
        heartbeat_seconds=cluster.heartbeat_seconds,
        silence_seconds=cluster.silence_seconds,
        abort_seconds=cluster.abort_seconds,
        grace_seconds=cluster.grace_seconds,
        setup_seconds=cluster.setup_seconds,
    )


def _job_end(config: RunConfig, facts: Facts, attempt: Attempt) -> float | None:
    """Head only: when the job ends, by the head's clock."""
    from pekoe.launch.time_budget import job_end

    now = time.time()
    end, warnings = job_end(facts, config.cluster.time_limit, attempt_began(attempt), now)
    for warning in warnings:
        logger.warning(warning)
    if end is not None:
        logger.info("the job ends in %.0f s", end - now)
    return end


def _enter_environment(config: RunConfig, facts: Facts, placement: Placement) -> RankPlan:
    """Before torch is loaded: the variables of this process are the plan's from now on."""
    plan = rank_environment.plan(os.environ, placement, config, facts)
    rank_environment.enter(plan)
    return plan


def _enter_attempt(state: RankState, attempt: Attempt) -> None:
    """Log, error record and a first heartbeat from now on."""
    from pekoe.launch.heartbeat_files import write_heartbeat
    from pekoe.launch.rank_log import log_path, open_log
    from pekoe.pipeline.messages import Heartbeat

    log = log_path(attempt.run, attempt.number, state.rank)
    state.set_run(attempt.run, attempt.number, str(log.relative_to(attempt.run.path)))
    open_log(log, state.rank, is_head=state.rank == 0)
    write_heartbeat(
        attempt.run,
        attempt.number,
        Heartbeat(state.rank, state.role, state.host, os.getpid(), 0, "starting", 0.0, -1),
    )


def _begin_together(world: World, config: RunConfig, origin: Origin) -> Attempt:
    """The head begins the attempt, all others wait for its word. RunDirectoryError on all ranks where it is refused."""
    assert origin.begin is not None
    answer: dict[str, object] | None = None
    if world.rank == 0:
        try:
            attempt = origin.begin(config)
            answer = {"run": str(attempt.run.path), "number": attempt.number}
        except RunDirectoryError as error:
            answer = {"error": str(error)}
    answer = world.share(answer)
    assert answer is not None
    if "error" in answer:
        raise RunDirectoryError(str(answer["error"]))
    return Attempt(RunDirectory(Path(str(answer["run"]))), int(str(answer["number"])))


def _device_index(config: RunConfig, world: World, plan: RankPlan) -> int:
    """Position of this rank's device among those that it sees; 0 where devices are shared (cpu). ValueError when two
    ranks hold one device."""
    from pekoe.pipeline.devices.device import choose

    device = choose(config.cluster.device)
    variable = device.visible_devices_variable
    if not variable:
        index = 0
    elif plan.device is not None and plan.device_variable == variable:
        index = plan.device.ordinal
    else:
        index = environment.pick_device(world.facts, variable, device.count()).ordinal
    environment.check_distinct(world.collect(device.identity(index)))
    return index


def main(arguments: list[str]) -> NoReturn:
    """`RUN ATTEMPT`, as the local launcher gives them."""
    attempt = Attempt(RunDirectory(Path(arguments[0])), int(arguments[1]))

    def load() -> RunConfig:
        from pekoe.pipeline.config.load import load

        return load(attempt.run.config)

    run_rank(Origin(load, attempt))


if __name__ == "__main__":
    main(sys.argv[1:])
