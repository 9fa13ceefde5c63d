"""The ranks of a real world agree on where to begin: by hashes, whatever a rank sees late or damaged."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_checkpoint import save
from worlds import Ended, StartedWorld

from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import Checkpoints

PROGRAM = Path(__file__).with_name("start_program.py")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create()
    (run.path / "data.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 10)
    return run


def choose(run: RunDirectory, what: str = "plain") -> Ended:
    return StartedWorld(run.path, what, 3, PROGRAM).finish(90.0)


def points(ended: Ended) -> list[tuple[Any, ...]]:
    """(version, checkpoint, num_steps) of each rank that said one."""
    assert ended.code == 0, ended.output
    return [(point["version"], point["checkpoint"], point["num_steps"]) for point in ended.said if "rank" in point]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_fresh_run_begins(run: RunDirectory) -> None:
    assert points(choose(run)) == [(0, "", 15)] * 3


def test_damaged_ones_are_passed_over_and_leave_the_way(run: RunDirectory) -> None:
    """A flipped bit that only one rank reads, a file that is cut short, and what is older than the chosen one."""
    checkpoints = Checkpoints(run, keep=9)
    for step in (8, 9, 10, 11):
        save(checkpoints, step)
    flip_a_bit(run.checkpoints / "step-8" / "controller.msgpack")
    flip_a_bit(run.checkpoints / "step-10" / "engine" / "__1_0.distcp")
    os.truncate(run.checkpoints / "step-11" / "engine" / "__0_0.distcp", 3)
    ended = choose(run)
    assert points(ended) == [(9, str(run.checkpoints / "step-9"), 15)] * 3
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-8", "step-9"]
    reasons = {path.name: path.read_text() for path in run.set_aside.glob("*.reason.json")}
    assert len(reasons) == 2
    assert "engine/__1_0.distcp differs from what was written" in reasons["checkpoints__step-10.reason.json"]
    assert "engine/__0_0.distcp has 3 bytes, 1000 were written" in reasons["checkpoints__step-11.reason.json"]


def test_ranks_that_see_the_checkpoint_late_come_to_the_same_decision(run: RunDirectory) -> None:
    checkpoints = Checkpoints(run, keep=9)
    save(checkpoints, 1)
    save(checkpoints, 2)
    ended = choose(run, "late")
    assert points(ended) == [(2, str(run.checkpoints / "step-2"), 15)] * 3
    assert min(point["seconds"] for point in ended.said if "rank" in point) > 2.5, "nobody went on before the late rank"
    assert not list(run.set_aside.iterdir())


def test_only_damaged_ones_are_an_error_that_says_what_to_do_and_moves_nothing(run: RunDirectory) -> None:
    checkpoints = Checkpoints(run, keep=9)
    flip_a_bit(save(checkpoints, 1) / "controller.msgpack")
    (save(checkpoints, 2) / "COMPLETE.json").unlink()
    ended = choose(run)
    assert ended.code not in (0, 75)
    assert not [point for point in ended.said if "rank" in point]
    (record,) = ended.records
    assert "no checkpoint is usable" in record["error"]
    assert f"pekoe doctor {run.path}" in record["error"]
    assert "controller.msgpack differs from what was written" in record["error"]
    assert "step-2: has no COMPLETE.json" in record["error"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-1", "step-2"]
