"""Supervised tasks (sft, dpo, rw): the wiring of one rank. There are trainer ranks only.

    trainer rank      main thread: MPI, signals, watchdog        learner thread: collective steps
      the head also                                              controller thread: decisions; bookkeeping thread

    controller  waits for steps, evaluations and saves     <- learner threads
    learner     waits for the head's word only (outside of collectives)

World, checkpoints, resumption, metrics and the ends of a run are those of RL; there are no shards, no ledger (the order
of the data is a pure function of seed, epoch and step) and no weight updates.
"""

from __future__ import annotations

import functools
import logging

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.context import HEAD, Ranks, RunContext, World
from pekoe.pipeline.runs.rl import DONE, REQUEUE, Crew, Prepared
from pekoe.pipeline.runs.start import choose_start
from pekoe.pipeline.runs.supervised_data import SupervisedData

logger = logging.getLogger(__name__)


def prepare(config: RunConfig, roles: tuple[str, ...], rollout_engine: str) -> Prepared:
    """Nothing needs to exist before MPI does. ValueError when the allocation has rollout ranks."""
    if rollout_engine:
        raise ValueError(f"allocation: {rollout_engine} ranks have nothing to do in task {config.task}")
    return Prepared(None)


def run(
    config: RunConfig, world: World, ranks: Ranks, directory: RunDirectory, prepared: Prepared, device_index: int = 0
) -> int:
    """One rank of one attempt, from the formed world to its end. Exit code: 0 done, 75 stopped by a signal."""
    from transformers.utils import logging as transformers_logging

    from pekoe.pipeline.runs.supervised_head import lead
    from pekoe.pipeline.runs.supervised_resume import SupervisedPast, go_back
    from pekoe.pipeline.runs.supervised_trainer import train

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    world.set_role("trainer")
    world.set_phase("starting")
    data = SupervisedData(config)
    start = choose_start(directory, config, world, ranks.trainer_ranks, data)
    past = SupervisedPast()
    if world.attempt > 0:
        if world.rank == HEAD:
            world.set_phase("setting aside what came after the start point")
            past = go_back(directory, config, world.attempt, start)
        world.share("done" if world.rank == HEAD else None)
    context = RunContext(config, world, ranks, directory, choose(config.cluster.device), device_index, start, data)
    world.set_version(start.version)
    outcomes: list[str] = []
    crew = Crew(world)
    crew.start("learner", lambda: outcomes.append(train(context, crew, functools.partial(lead, past=past))))
    world.serve(crew.done)
    prepared.close()
    return REQUEUE if "stopped" in outcomes else DONE
