"""Ranks that choose a start point: `python start_program.py RUN WHAT`, in a world of three with two trainer ranks."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pekoe.launch import environment
from pekoe.launch.rank_state import RankState
from pekoe.launch.supervisor import Reports, supervise
from pekoe.launch.world import World, WorldSettings
from pekoe.pipeline import files
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.start import RunData, choose_start

OUT = os.fdopen(os.dup(1), "w")
RUN, WHAT = Path(sys.argv[1]), sys.argv[2]
TRAINERS = (0, 1)
LATE_SECONDS = 3.0


def see_late() -> None:
    """This rank sees no names, and no file of a checkpoint for a while."""
    began, stat = time.monotonic(), Path.stat

    def is_late(path: Path) -> bool:
        return "step-" in str(path) and time.monotonic() < began + LATE_SECONDS

    class Late(files.Disk):
        def read(self, path: Path) -> bytes:
            if is_late(path):
                raise OSError(errno.ESTALE, "planted", str(path))
            return super().read(path)

    def late_stat(self: Path, **more: Any) -> os.stat_result:
        if is_late(self):
            raise FileNotFoundError(errno.ENOENT, "planted", str(self))
        return stat(self, **more)

    files.disk = Late()
    Path.stat = late_stat  # type: ignore[method-assign, assignment]
    Path.exists = lambda self, **_: False  # type: ignore[method-assign, assignment]
    Path.iterdir = lambda self: iter(())  # type: ignore[method-assign, assignment]
    os.listdir = lambda path=".": []  # type: ignore[assignment]


def rank_program(reports: Reports) -> int:
    facts = environment.read(os.environ)
    state = RankState(facts.rank, facts.host, reports, 5.0)
    state.catch_everything()
    run = RunDirectory(RUN)
    state.set_run(run, 0)
    config = RunConfig()
    config.train_dataset.type, config.train_dataset.path = "jsonl", str(RUN / "data.jsonl")
    config.train_dataset.batch_size, config.total_train_epochs = 2, 3
    with World.join(3, WorldSettings(heartbeat_seconds=0.2, setup_seconds=30.0), facts=facts, state=state) as world:
        world.begin_attempt(run, 0)
        if WHAT == "late" and world.rank > 0:
            see_late()
        began = time.monotonic()
        start = choose_start(run, config, world, TRAINERS, RunData(config))
        told = {**dataclasses.asdict(start), "rank": world.rank, "seconds": time.monotonic() - began}
        OUT.write(json.dumps(told) + "\n")
        OUT.flush()
    return 0


if __name__ == "__main__":
    supervise(rank_program, environment.read(os.environ).rank)
