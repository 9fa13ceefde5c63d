"""A real run that was killed and gone on with, made once for all tests that look at run directories."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@dataclass(frozen=True)
class KilledRun:
    """Two states of one run of 8 steps, a checkpoint every second: copy before you damage."""

    killed: Path
    """Its rollout rank was killed after step 5."""
    resumed: Path
    """The same, resumed and finished."""
    seconds: float
    """From the kill to the end of the world."""
    pids: tuple[int, ...]
    """Of the ranks of the killed attempt."""


@pytest.fixture(scope="session")
def killed_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, sums: Path) -> KilledRun:
    from run_command import base_overrides, run
    from test_death import heartbeats, start, wait_for_step

    root = tmp_path_factory.mktemp("killed")
    overrides = {
        **base_overrides(root, tiny_model, sums, "killed"), "total_train_steps": 8, "recover.freq_steps": 2,
        "rollout.shard_max_groups": 4,
    }  # fmt: skip
    path = root / "test" / "killed"
    process = start(root, overrides)
    wait_for_step(path, 5, process)
    pids = tuple(int(beat["pid"]) for _, beat in sorted(heartbeats(path).items()))
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait(timeout=120) == 1
    seconds = time.monotonic() - began
    copy = root / "copy"
    shutil.copytree(path, copy)
    outcome = run(root, overrides, resume=True)
    assert outcome.code == 0, outcome.text
    return KilledRun(copy, path, seconds, pids)
