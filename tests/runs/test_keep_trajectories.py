"""What becomes of consumed shards: real runs, one of them killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import Outcome, base_overrides, run
from test_death import heartbeats, start, wait_for_step

STEPS = 16


def rows_of(paths: list[Path]) -> Counter[tuple[int, int]]:
    """(group, sample) of every row of these files."""
    from pekoe.pipeline.trajectory.shard import Shard

    found: Counter[tuple[int, int]] = Counter()
    for path in paths:
        with Shard(path) as shard:
            shard.verify()
            found.update((group.number, t.sample) for group in shard.groups() for t in group.trajectories)
    return found


def consumed_rows(outcome: Outcome) -> Counter[tuple[int, int]]:
    return Counter((group, sample) for step in outcome.consumed() for group in step for sample in range(4))


@pytest.mark.timeout(300)
@pytest.mark.trainers
def test_an_archive_holds_every_consumed_trajectory_once_also_after_a_kill(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "archived"), "total_train_epochs": 2, "total_train_steps": STEPS,
        "recover.freq_steps": 2, "rollout.keep_trajectories": "archive",
    }  # fmt: skip
    path = tmp_path / "test" / "archived"
    process = start(tmp_path, overrides)
    wait_for_step(path, 7, process)
    os.kill(int(heartbeats(path)[1]["pid"]), signal.SIGKILL)
    assert process.wait(timeout=120) == 1
    outcome = run(tmp_path, overrides, resume=True)
    assert outcome.code == 0, outcome.text
    archives = sorted((path / "archive").glob("*.h5"))
    assert 1 <= len(archives) <= 2
    assert rows_of(archives) == consumed_rows(outcome)
    assert sum(consumed_rows(outcome).values()) == 16 * STEPS
    assert not list((path / "archive").glob("*.part"))
    left = rows_of(list((path / "shards").glob("*/*.h5")))
    assert not left & consumed_rows(outcome)
    listed = subprocess.run(
        [sys.executable, "-m", "pekoe.launch.cli", "shards", "ls", path], capture_output=True, text=True, timeout=60
    )
    assert listed.returncode == 0
    assert "archive/000000.h5" in listed.stdout


@pytest.mark.timeout(200)
def test_consumed_shards_are_deleted_when_a_checkpoint_covers_them(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "deleted"), "total_train_steps": 8, "recover.freq_steps": 4,
        "rollout.keep_trajectories": "none",
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text
    assert not rows_of(list((outcome.run / "shards").glob("*/*.h5"))) & consumed_rows(outcome)
    assert not list(outcome.run.glob("archive/*"))
    assert sum(consumed_rows(outcome).values()) == 16 * 8
