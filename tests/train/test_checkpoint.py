"""Checkpoints: whatever is killed or damaged, the newest complete one is found, or the run stops."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pekoe.pipeline.complete_folder import MARKER, IncompleteFolderError, verify
from pekoe.pipeline.devices.cpu_device import CpuDevice
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import CheckpointError, Checkpoints
from pekoe.pipeline.train.rng_state import capture_rng_state, restore_rng_state


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def save(checkpoints: Checkpoints, step: int) -> Path:
    part = checkpoints.begin(step)
    (part / "engine").mkdir(exist_ok=True)
    for rank in range(2):
        (part / "engine" / f"__{rank}_0.distcp").write_bytes(bytes([rank, step % 256]) * 500)
    (part / "controller.msgpack").write_bytes(b"state of %d" % step)
    return checkpoints.commit(step, {"version": step})


def test_newest_is_found_in_numeric_order(run):
    checkpoints = Checkpoints(run, keep=9)
    assert checkpoints.latest() is None
    for step in (9, 10, 100, 11):
        save(checkpoints, step)
    assert checkpoints.latest(deep=True) == (100, run.checkpoints / "step-100")
    assert checkpoints.open(run.checkpoints / "step-11")["version"] == 11


def test_all_ranks_get_the_same_folder(run):
    head, other = Checkpoints(run, 1), Checkpoints(run, 1)
    stale = other.part(3) / "half"
    stale.write_text("from a save that failed")
    part = head.begin(3)
    assert not stale.exists()
    assert other.part(3) == part
    (part / "b").write_text("from rank 1")
    (part / "a").write_text("from rank 0")
    final = head.commit(3)
    assert {entry["name"] for entry in verify(final, deep=True)["files"]} == {"a", "b"}
    with pytest.raises(ValueError, match="commit without begin"):
        head.commit(4)


def missing_file(path: Path) -> None:
    (path / "engine" / "__1_0.distcp").unlink()


def zero_bytes(path: Path) -> None:
    (path / "engine" / "__1_0.distcp").write_bytes(b"")


def wrong_size(path: Path) -> None:
    os.truncate(path / "controller.msgpack", 3)


def no_marker(path: Path) -> None:
    (path / MARKER).unlink()


def half_marker(path: Path) -> None:
    os.truncate(path / MARKER, 40)


def empty_folder(path: Path) -> None:
    for file in list(path.rglob("*")):
        if file.is_file():
            file.unlink()


DAMAGES = [missing_file, zero_bytes, wrong_size, no_marker, half_marker, empty_folder]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_one_is_skipped_with_its_reason(run, damage, caplog):
    checkpoints = Checkpoints(run, keep=5)
    save(checkpoints, 10)
    damage(save(checkpoints, 20))
    assert checkpoints.latest() == (10, run.checkpoints / "step-10")
    assert "checkpoint of step 20 is skipped" in caplog.text
    assert checkpoints.prune() == []
    assert (run.checkpoints / "step-20").exists(), "damaged ones are for people to look at"


@pytest.mark.parametrize("damage", DAMAGES)
def test_only_damaged_ones_stop_the_run(run, damage):
    checkpoints = Checkpoints(run, keep=5)
    damage(save(checkpoints, 20))
    with pytest.raises(CheckpointError, match="no checkpoint is usable"):
        checkpoints.latest()


def test_same_size_damage_is_found_by_the_hash(run):
    checkpoints = Checkpoints(run, keep=5)
    save(checkpoints, 1)
    path = save(checkpoints, 2)
    file = path / "engine" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[77] ^= 1
    file.write_bytes(data)
    assert checkpoints.latest() == (2, path)
    assert checkpoints.latest(deep=True) == (1, run.checkpoints / "step-1")


def test_begun_ones_count_for_nothing_and_are_cleared_by_the_next_attempt(run):
    first = Checkpoints(run, keep=2, attempt=0)
    (first.begin(5) / "half").write_text("x")
    assert first.latest() is None
    save(first, 4)
    second = Checkpoints(run, keep=2, attempt=1)
    mine = second.begin(6)
    second.prune()
    assert [path.name for path in run.checkpoints.iterdir() if path.name.endswith(".part")] == [mine.name]
    second.abandon(6)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-4"]


def test_prune_keeps_enough_complete_ones_and_the_resume_point(run):
    checkpoints = Checkpoints(run, keep=2)
    for step in (1, 2, 3):
        save(checkpoints, step)
    zero_bytes(save(checkpoints, 4))
    resumed = Checkpoints(run, keep=1, attempt=1)
    assert resumed.latest() == (3, run.checkpoints / "step-3")
    assert {path.name for path in resumed.prune()} == {"step-1", "step-2"}
    zero_bytes(save(resumed, 5))
    assert resumed.prune() == []
    save(resumed, 6)
    assert {path.name for path in resumed.prune()} == {"step-3"}
    assert resumed.latest() == (6, run.checkpoints / "step-6")


def test_named_step(run):
    checkpoints = Checkpoints(run, keep=2)
    path = save(checkpoints, 1)
    zero_bytes(save(checkpoints, 2))
    assert checkpoints.complete(1) == path
    for step in (2, 3):
        with pytest.raises(ValueError, match=f"no complete checkpoint of step {step}; allowed: 1, 2"):
            checkpoints.complete(step)


def test_step_saved_again_replaces_nothing(run):
    save(Checkpoints(run, keep=3), 7)
    again = Checkpoints(run, keep=1, attempt=1)
    path = save(again, 7)
    assert path.name == "step-7.1"
    assert again.latest() == (7, path)
    again.prune()
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-7.1"]


def test_other_rank_waits_for_a_late_view(run):
    checkpoints = Checkpoints(run, keep=1)
    path = save(checkpoints, 1)
    hidden = path.with_name("hidden")
    path.rename(hidden)
    with pytest.raises(IncompleteFolderError):
        checkpoints.open(path, retry_seconds=0.2)
    child = subprocess.Popen(
        [sys.executable, "-c", f"import time, os; time.sleep(.5); os.rename({str(hidden)!r}, {str(path)!r})"]
    )
    assert checkpoints.open(path, retry_seconds=20)["step"] == 1
    assert child.wait(10) == 0


@pytest.mark.timeout(120)
def test_kill_at_any_instant_leaves_a_complete_newest_one(run):
    chance = random.Random(5)
    committed = 0
    for attempt in range(12):
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("checkpoint_process.py")), str(run.path), str(attempt)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdout is not None
        first = child.stdout.readline()
        assert int(first) > committed, "each attempt goes on from the newest one"
        time.sleep(chance.uniform(0, 0.25))
        child.kill()
        steps = [int(first), *(int(line) for line in child.stdout.read().split("\n")[:-1])]
        child.wait(10)
        found = Checkpoints(run, keep=2, attempt=attempt + 1).latest(deep=True)
        assert found is not None
        committed, path = found
        assert committed in (steps[-1], steps[-1] + 1)
        assert (path / "state.json").read_text() == str(committed)
    assert sum(1 for path in run.checkpoints.iterdir() if "part" not in path.name) <= 4


def test_random_state_draws_the_same_numbers_again():
    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(1))

    device = CpuDevice()
    draw()
    state = capture_rng_state(device)
    expected = [draw() for _ in range(3)]
    for _ in range(5):
        draw()
    restore_rng_state(state, device)
    assert [draw() for _ in range(3)] == expected
