"""Several rollout ranks on one node: one of them writes the shards of all, and the history stays exact."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import Outcome, base_overrides, run
from test_death import heartbeats, start, wait_for_step

from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.hand_over import MEMORY, _digest
from pekoe.pipeline.trajectory.store import Store


def folders_of(run: RunDirectory) -> list[Path]:
    """What lies in the node's memory of a run, whether or not its owners live."""
    return sorted(MEMORY.glob(f"pekoe-groups-*-{_digest(run)}-attempt-*"))


def check_history(outcome: Outcome, attempts: int, steps: int) -> None:
    """Every group once, in shards of one writer an attempt."""
    assert outcome.code == 0, outcome.text
    consumed = [group for step in outcome.consumed() for group in step]
    assert sorted(consumed) == list(range(4 * steps))
    assert {path.name for path in (outcome.run / "shards").iterdir()} == {f"{n}-rank-1" for n in range(attempts)}
    store = Store(RunDirectory(outcome.run))
    assert {group.group for name in store.paths() for group in store.notice(name).groups} >= set(consumed)


def overrides_of(root: Path, model: Path, sums: Path, steps: int) -> dict[str, Any]:
    return {
        **base_overrides(root, model, sums, "node"), "allocation": "hf:d3+fsdp:d1", "total_train_steps": steps,
        "cluster.ranks_per_writer": 1, "recover.freq_steps": 2,
    }  # fmt: skip


@pytest.mark.timeout(200)
def test_one_rank_of_a_node_writes_for_all_of_it(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    check_history(run(tmp_path, overrides_of(tmp_path, tiny_model, sums, 3)), attempts=1, steps=3)
    assert folders_of(RunDirectory(tmp_path / "test" / "node")) == []


@pytest.mark.trainers
@pytest.mark.timeout(200)
def test_a_killed_member_leaves_nothing_behind_that_the_resumed_run_does_not_remove(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    overrides = overrides_of(tmp_path, tiny_model, sums, 6)
    path = tmp_path / "test" / "node"
    process = start(tmp_path, overrides)
    wait_for_step(path, 3, process)
    os.kill(int(heartbeats(path)[3]["pid"]), signal.SIGKILL)
    assert process.wait(timeout=120) == 1
    assert json.loads((path / "errors" / "attempt-0.json").read_text())["rank"] == 3
    left = folders_of(RunDirectory(path))
    whose = [folder.name.partition("attempt-")[2].rpartition("-")[0] for folder in left]
    assert whose == ["0-rank-1", "0-rank-2", "0-rank-3"]
    check_history(run(tmp_path, overrides, resume=True), attempts=2, steps=6)
    assert folders_of(RunDirectory(path)) == []
