"""A rank with an engine in a child process, to be killed: `python child_rank.py FOLDER WORDS`.

Writes FOLDER/pids once the engine serves: this process, the nursery, the engine's process, and what that has started.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from child_worlds import settings

from pekoe.pipeline.rollout.child.child_engine import ChildEngine
from pekoe.pipeline.rollout.child.nursery import EngineNursery

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    nursery = EngineNursery().start()
    engine = ChildEngine(nursery, "child_worlds:EchoEngine", settings(sys.argv[2]))
    engine.load_weights(iter([("weight", torch.ones(1 << 20))]), 1)
    engine.load_adapter("notes", folder, 0)
    started = (folder / "notes").read_text().split("\n")[1]
    (folder / "part").write_text(f"{os.getpid()} {nursery.pid} {engine.pid} {started}")
    (folder / "part").rename(folder / "pids")
    time.sleep(600)
