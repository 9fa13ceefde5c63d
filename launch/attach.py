"""`pekoe attach RUN`: a small world of rollout ranks that serves a running run through its directory alone.

    RUN/attached/<world>/   this world's own logs, heartbeats, errors, configuration: a small run directory
    RUN/leases, inbox       what it samples, and what it tells
    RUN/shards, weights     where its trajectories go, and where its weights come from

It is a world of its own: it may start late, die at any time, and outlive an attempt of the trainer.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pekoe.launch import environment
from pekoe.launch.attempts import RunDirectoryError, check_is_run
from pekoe.launch.stop_signals import EXIT_REQUEUE
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    from pekoe.launch.placement import Placement
    from pekoe.pipeline.config.run import RunConfig

OWN_KEYS = (
    "allocation", "cluster", "rollout.max_slots", "rollout.engine_process", "rollout_array", "reward.processes", "vllm",
)  # fmt: skip
"""What an attached world may have otherwise than its run: where and how fast it samples, never what."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings of this world: allocation (e.g. hf:d2), cluster.*, …",
    )


def main(arguments: argparse.Namespace) -> int:
    """Exit code: 0 the run is over or silent, 75 stopped by a signal, 78 wrong configuration, 1 failure."""
    return attach(RunDirectory(arguments.run.absolute()), arguments.overrides)


def attach(run: RunDirectory, overrides: Sequence[str] = ()) -> int:
    """Starts the world and waits for its end. A job that was preempted goes back into the queue, as
    `cluster.continue_by: requeue` says, and attaches again as a new world."""
    from pekoe.launch.continuation import Continuation, wait_for_end
    from pekoe.launch.job import WorldStart, start_world
    from pekoe.pipeline.config.snapshot import write_run_config

    config, placement = attached_config(run, overrides)
    world = world_directory(run)
    for folder in (world.path, world.heartbeats, world.errors, world.metrics):
        files.make_folder(folder)
    write_run_config(world, config)
    if run.code.is_dir():
        os.symlink(run.code, world.code)
    now = time.time()
    first: dict[str, Any] = {"number": 0, "began": now, "host": socket.gethostname(), "overrides": list(overrides)}
    files.write_json(
        world.run_json, {"id": uuid.uuid4().hex, "began": now, "attempts": [first], "attached_to": str(run.path)}
    )
    print(f"pekoe: {world.path.name} attaches to {run.path}, {placement}", flush=True)
    program = ("-m", "pekoe.launch.attached_rank", str(world.path))
    code = start_world(WorldStart(world, 0, program, placement.world_size, config, placement))
    facts = environment.read(os.environ)
    job = Continuation(world, config, facts)
    may_go_on = job.how == "requeue" and facts.restart_count + 1 < config.cluster.max_attempts
    if code == EXIT_REQUEUE and may_go_on and job.requeue():
        wait_for_end()
    return code


def attached_config(run: RunDirectory, overrides: Sequence[str] = ()) -> tuple[RunConfig, Placement]:
    """Configuration and placement of a world that attaches to `run`; ValueError lists what is wrong.

    `allocation` is one rollout part; without one, it is that of the run itself.
    """
    from pekoe.launch.allocation import check_engines, place, place_attached
    from pekoe.pipeline.config.check import check
    from pekoe.pipeline.config.load import load

    check_is_run(run)
    refused = [text.partition("=")[0] for text in overrides if not _is_own(text.partition("=")[0])]
    if refused:
        raise RunDirectoryError(
            f"{', '.join(refused)}: an attached world samples as its run does; allowed here: {', '.join(OWN_KEYS)}"
        )
    config = load(run.config, overrides)
    if not config.rollout_array.enabled:
        raise RunDirectoryError(
            f"rollout_array.enabled: False in {run.config}: nothing is offered there; allowed: true, when the run is "
            "started or resumed"
        )
    if not any(text.startswith("allocation=") for text in overrides):
        rollout = place(config).rollout
        if rollout is None:
            raise RunDirectoryError("allocation: the run has no rollout part to copy; allowed: one here, e.g. hf:d1")
        config.allocation = str(rollout)
    config.rollout.backend = config.actor.backend = ""
    config.cluster.rollout_nodes = None
    placement = place_attached(config)
    if not any(text.startswith("cluster.n_nodes=") for text in overrides):
        config.cluster.n_nodes = math.ceil(placement.world_size / config.cluster.n_gpus_per_node)
    if not any(text.startswith("cluster.spare_nodes=") for text in overrides):
        config.cluster.spare_nodes = 0
    check_engines(placement)
    check(config, placement)
    return config, placement


def world_directory(run: RunDirectory) -> RunDirectory:
    """A name of its own for each start, a requeue of the same array element included: what is left of an earlier start
    can never be taken for this one's."""
    facts = environment.read(os.environ)
    job = facts.job_id or f"{facts.host}-{os.getpid()}"
    name = re.sub(r"[^A-Za-z0-9_-]", "-", job)
    return RunDirectory(run.attached / f"{name}-{uuid.uuid4().hex[:6]}")


def _is_own(key: str) -> bool:
    return any(key == own or key.startswith(f"{own}.") for own in OWN_KEYS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="pekoe attach")
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
