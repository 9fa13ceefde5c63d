"""Reinforcement learning: the wiring of one rank, whatever its roles.

    trainer rank      main thread: MPI, signals, watchdog        learner thread: collective steps (`rl_trainer.py`)
      the head also                                              controller thread: decisions (`rl_head.py`)
    rollout rank      main thread: the same                      rollout thread: messages, shards (`rl_rollout.py`)
                                                                 executor thread: workflows; engine thread: decoding
      of an engine over several ranks, all but the first         rollout thread: weights; engine thread: lockstep
                                                                 (`rl_follower.py`)
    colocated rank    both columns in one process; the device is the engine's or the trainer's by turns

    controller  waits for groups    <- rollout thread publishes shards       (Published, after Flush when it starves)
                waits for rows read and steps done    <- learner thread
                waits for engines to stop and to confirm weights    <- rollout thread
    learner     waits for the head's word only (outside of collectives)
    rollout     waits for assignments (admission) and, in an update, for buckets    <- learner on the head
    executor    waits for tokens (engine) and rewards (pool of child processes)

Before any of these threads starts, the head of a later attempt sets aside what lies beyond its start point
(`resume.py`), and the others wait for its word. The main thread serves the post office until every role thread of the
rank has ended, or the world fails.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.reward.pool import RewardPool
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.context import HEAD, Ranks, RunContext, World
from pekoe.pipeline.runs.engine_setup import start_nursery
from pekoe.pipeline.runs.start import RunData, choose_start

logger = logging.getLogger(__name__)

DONE, REQUEUE = 0, 75


@dataclass
class Prepared:
    """What must exist before MPI does: processes are never started from a rank that has initialised MPI."""

    pool: RewardPool | None
    nursery: EngineNursery | None = None
    """None where this rank's engine runs in its own process, or it has none."""

    def close(self) -> None:
        """Ends all of them."""
        for keeper in (self.pool, self.nursery):
            if keeper is not None:
                keeper.close()


def prepare(config: RunConfig, roles: tuple[str, ...], rollout_engine: str) -> Prepared:
    """Called on every rank before MPI is initialised; `rollout_engine` is the name of the engine, "" without one."""
    if "rollout" not in roles:
        return Prepared(None)
    return Prepared(RewardPool(config.reward).start(), start_nursery(config, roles, rollout_engine))


def run(
    config: RunConfig, world: World, ranks: Ranks, directory: RunDirectory, prepared: Prepared, device_index: int = 0
) -> int:
    """One rank of one attempt, from the formed world to its end. Exit code: 0 done, 75 stopped by a signal."""
    from transformers.utils import logging as transformers_logging

    from pekoe.pipeline.runs.resume import Past, go_back
    from pekoe.pipeline.runs.rl_follower import serve
    from pekoe.pipeline.runs.rl_head import lead
    from pekoe.pipeline.runs.rl_trainer import train

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    roles = ranks.roles_of(world.rank)
    world.set_role("+".join(roles))
    world.set_phase("starting")
    data = RunData(config)
    start = choose_start(directory, config, world, ranks.trainer_ranks, data)
    past = Past()
    if world.attempt > 0:
        if world.rank == HEAD:
            world.set_phase("setting aside what came after the start point")
            past = go_back(directory, config, world.attempt, start, data)
        world.share("done" if world.rank == HEAD else None)
    device = choose(config.cluster.device)
    context = RunContext(config, world, ranks, directory, device, device_index, start, data, nursery=prepared.nursery)
    world.set_version(context.start.version)
    outcomes: list[str] = []
    crew = Crew(world)
    if "trainer" in roles:
        crew.start("learner", lambda: outcomes.append(train(context, crew, functools.partial(lead, past=past))))
    if "rollout" in roles:
        crew.start("rollout", lambda: outcomes.append(serve(context, prepared.pool)))
    world.serve(crew.done)
    prepared.close()
    return REQUEUE if "stopped" in outcomes else DONE


class Crew:
    """The role threads of a rank; `done` is set when all of them have ended well (a failure ends the world instead)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._running = 0
        self.done = threading.Event()

    def start(self, name: str, target: Callable[[], object]) -> None:
        with self._lock:
            self._running += 1

        def work() -> None:
            target()
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self.done.set()

        self._world.start(name, work)
