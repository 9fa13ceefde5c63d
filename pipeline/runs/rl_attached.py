"""An attached world: rollout ranks alone, which serve a run that goes on elsewhere through its directory.

    rank 0     main thread: MPI, signals, watchdog    rollout, executor, engine threads as in every world
               foreman thread: lease files, versions, notices (`control/foreman.py`)
    others     main thread; rollout, executor, engine

    foreman    waits for offers     <- the run's head writes them
               waits for engines to stop, to load (from disk) and to confirm    <- rollout threads
    rollout    waits for assignments, and in an update for files               <- foreman

Launch files (logs, heartbeats, errors) are in this world's own small directory, `RUN/attached/<world>`; shards, weights
and leases are the run's.
"""

from __future__ import annotations

import logging

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.foreman import INBOX_KINDS, Foreman, ForemanParts
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.leases.config_hash import config_hash
from pekoe.pipeline.leases.lease_holder import LeaseHolder
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.context import HEAD, Ranks, RunContext, World
from pekoe.pipeline.runs.rl import DONE, REQUEUE, Crew, Prepared, prepare
from pekoe.pipeline.runs.start import RunData, StartPoint

logger = logging.getLogger(__name__)

__all__ = ["Prepared", "prepare", "run"]

LOAD_FACTOR = 2
"""Limit for loading a version, in units of `weights.bucket_seconds`: the file is there already."""


def run(
    config: RunConfig, world: World, ranks: Ranks, directory: RunDirectory, prepared: Prepared, device_index: int = 0
) -> int:
    """One rank of an attached world, from the formed world to its end. Exit code: 0 done, 75 stopped by a signal."""
    from transformers.utils import logging as transformers_logging

    from pekoe.pipeline.runs.rl_follower import serve

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    served = RunDirectory(directory.path.parent.parent)
    world.set_role("rollout")
    world.set_phase("starting")
    device = choose(config.cluster.device)
    start = StartPoint(-1, "", 0)
    name = directory.path.name
    context = RunContext(
        config, world, ranks, served, device, device_index, start, RunData(config), attached=name,
        nursery=prepared.nursery,
    )  # fmt: skip
    world.set_version(start.version)
    outcomes: list[str] = []
    crew = Crew(world)
    if world.rank == HEAD:
        foreman = build_foreman(context)
        crew.start("foreman", lambda: outcomes.append(foreman.run()))
    crew.start("rollout", lambda: outcomes.append(serve(context, prepared.pool)))
    world.serve(crew.done)
    prepared.close()
    return REQUEUE if "stopped" in outcomes else DONE


def build_foreman(context: RunContext) -> Foreman:
    """Rank 0's second role."""
    config, world = context.config, context.world
    assert context.ranks.rollout is not None
    instances = context.ranks.rollout.instances
    slots = num_slots(config, len(instances))
    leases = LeaseHolder(context.run, context.attached, num_ranks=len(context.ranks.rollout_ranks), slots=slots)
    return Foreman(
        ForemanParts(
            post=world.post,
            inbox=world.post.inbox(*INBOX_KINDS),
            ranks=context.ranks.rollout_leaders,
            followers={leader: followers for leader, *followers in instances},
            leases=leases,
            slots=slots,
            config_hash=config_hash(config),
            poll_seconds=config.rollout_array.poll_seconds,
            orphan_seconds=config.rollout_array.orphan_seconds,
            ready_seconds=(
                config.weights.drain_seconds if config.weights.update_mode == "drain" else config.weights.ready_seconds
            ),
            setup_seconds=config.cluster.setup_seconds,
            load_seconds=LOAD_FACTOR * config.weights.bucket_seconds,
            away_seconds=config.cluster.progress_seconds,
            grace_seconds=config.cluster.grace_seconds,
            stop_requested=world.stop_requested.is_set,
            set_phase=context.phase_of("foreman"),
        )
    )


def num_slots(config: RunConfig, num_ranks: int) -> int:
    """Groups that a world takes at once: what its engines decode together, and half as much again for rewards and for
    the time until the next look at the offers."""
    groups = max(config.rollout.max_slots // config.gconfig.n_samples, 1)
    return num_ranks * (groups + max(groups // 2, 1))
