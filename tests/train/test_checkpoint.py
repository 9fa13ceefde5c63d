"""Checkpoints: whatever is killed or damaged, the newest complete one is found, or the run stops."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pekoe.pipeline import files
from pekoe.pipeline.complete_folder import MARKER, verify, verify_share
from pekoe.pipeline.devices.cpu_device import CpuDevice
from pekoe.pipeline.messages import WrittenFile
from pekoe.pipeline.pins import Pin
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train import checkpoint, checkpoint_reader
from pekoe.pipeline.train.checkpoint import CheckpointError, Checkpoints
from pekoe.pipeline.train.checkpoint_reader import pinned_checkpoint
from pekoe.pipeline.train.rng_state import capture_rng_state, restore_rng_state, seed_generators


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def write(part: Path, name: str, content: bytes) -> WrittenFile:
    """As writers do: durable, and hashed on the way."""
    files.make_folder((part / name).parent)
    with files.create(part / name) as file:
        file.write(content)
    return WrittenFile(name, file.num_bytes, file.digest)


def write_all(part: Path, step: int) -> list[WrittenFile]:
    written = [write(part, f"engine/__{rank}_0.distcp", bytes([rank, step % 256]) * 500) for rank in range(2)]
    return [*written, write(part, "controller.msgpack", b"state of %d" % step)]


def save(checkpoints: Checkpoints, step: int) -> Path:
    return checkpoints.commit(step, {"world_size": 2}, write_all(checkpoints.begin(step), step))


def test_newest_is_found_in_numeric_order(run):
    checkpoints = Checkpoints(run, keep=9)
    assert checkpoints.latest() is None
    for step in (9, 10, 100, 11):
        save(checkpoints, step)
    assert checkpoints.latest(deep=True) == (100, run.checkpoints / "step-100")
    marker = verify(run.checkpoints / "step-11", deep=True)
    assert (marker["step"], marker["attempt"], marker["world_size"]) == (11, 0, 2)


def test_all_ranks_get_the_same_folder_and_a_begun_one_is_empty(run):
    head, other = Checkpoints(run, 1), Checkpoints(run, 1)
    write(other.part(3), "half", b"from a save that failed")
    part = head.begin(3)
    assert not list(part.iterdir())
    assert other.part(3) == part
    final = head.commit(3, {}, [write(part, "b", b"from rank 1"), write(part, "a", b"from rank 0")])
    assert {entry["name"] for entry in verify(final, deep=True)["files"]} == {"a", "b"}
    with pytest.raises(ValueError, match="commit without begin"):
        head.commit(4, {}, [])


def unreported(part: Path, written: list[WrittenFile]) -> list[WrittenFile]:
    return written[1:]


def nothing_reported(part: Path, written: list[WrittenFile]) -> list[WrittenFile]:
    return []


def reported_twice(part: Path, written: list[WrittenFile]) -> list[WrittenFile]:
    return [*written, written[0]]


def never_written(part: Path, written: list[WrittenFile]) -> list[WrittenFile]:
    return [*written, WrittenFile("engine/__7_0.distcp", 9, "00" * 16)]


def cut_short(part: Path, written: list[WrittenFile]) -> list[WrittenFile]:
    os.truncate(part / written[0].name, 5)
    return written


@pytest.mark.parametrize("lie", [unreported, nothing_reported, reported_twice, never_written, cut_short])
def test_what_is_not_as_reported_is_never_committed(run, lie, monkeypatch):
    monkeypatch.setattr(checkpoint, "LATE_SECONDS", 0.1)
    checkpoints = Checkpoints(run, keep=2)
    save(checkpoints, 1)
    part = checkpoints.begin(2)
    with pytest.raises(OSError, match="checkpoint of step 2 is not what its writers reported"):
        checkpoints.commit(2, {}, lie(part, write_all(part, 2)))
    assert not (part / MARKER).exists()
    assert checkpoints.latest(deep=True) == (1, run.checkpoints / "step-1")
    save(checkpoints, 2)
    assert checkpoints.latest(deep=True) == (2, run.checkpoints / "step-2")


def test_commit_waits_for_files_that_another_node_wrote(run):
    checkpoints = Checkpoints(run, keep=1)
    part = checkpoints.begin(1)
    written = write_all(part, 1)
    (part / "engine").rename(run.path / "not in view")
    timer = threading.Timer(0.7, lambda: (run.path / "not in view").rename(part / "engine"))
    timer.start()
    path = checkpoints.commit(1, {}, written)
    timer.join()
    assert verify(path, deep=True)["step"] == 1


def test_stale_completion_of_an_abandoned_save_finalises_nothing(run):
    """Its writer goes on, and is heard, after the save was given up and the next one was begun."""
    checkpoints = Checkpoints(run, keep=3)
    old = checkpoints.begin(4)
    stale = write_all(old, 4)
    checkpoints.abandon(4)
    new = checkpoints.begin(5)
    write(old, "engine/__9_0.distcp", b"late")
    with pytest.raises(ValueError, match="checkpoint of step 4: commit without begin"):
        checkpoints.commit(4, {}, stale)
    assert checkpoints.latest() is None
    checkpoints.commit(5, {}, write_all(new, 5))
    checkpoints.prune()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-5"]


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


def test_a_folder_that_is_being_begun_is_never_taken_for_remains(run, monkeypatch):
    """Old checkpoints are pruned on a thread beside the one that begins the next save."""
    checkpoints = Checkpoints(run, keep=1)
    save(checkpoints, 1)
    make = files.disk.make_folder

    def make_then_prune(folder: Path, mode: int = 0o777) -> None:
        make(folder, mode)
        checkpoints.prune()

    monkeypatch.setattr(files.disk, "make_folder", make_then_prune)
    assert checkpoints.begin(2).is_dir()


def test_prune_keeps_enough_complete_ones_and_the_resume_point(run):
    checkpoints = Checkpoints(run, keep=2)
    for step in (9, 10, 11):
        save(checkpoints, step)
    zero_bytes(save(checkpoints, 12))
    resumed = Checkpoints(run, keep=1, attempt=1)
    assert resumed.latest() == (11, run.checkpoints / "step-11")
    assert {path.name for path in resumed.prune()} == {"step-9", "step-10"}
    zero_bytes(save(resumed, 13))
    assert resumed.prune() == [], "the newest that is complete stays, whatever came after it"
    save(resumed, 14)
    assert {path.name for path in resumed.prune()} == {"step-11"}
    assert resumed.latest() == (14, run.checkpoints / "step-14")


def test_a_checkpoint_that_is_read_is_kept_until_its_reader_lets_go_or_dies(run, monkeypatch):
    checkpoints = Checkpoints(run, keep=1)
    save(checkpoints, 1)
    with pinned_checkpoint(run) as (step, path):
        assert (step, path.name) == (1, "step-1")
        save(checkpoints, 2)
        assert checkpoints.prune() == []
        assert verify(path, deep=True)["step"] == 1
        assert checkpoints.latest() == (2, run.checkpoints / "step-2"), "pins are no checkpoints"
    assert [path.name for path in checkpoints.prune()] == ["step-1"]
    assert not list((run.checkpoints / "readers").iterdir())
    monkeypatch.setattr(checkpoint, "PIN_PATIENCE_SECONDS", 0.3)
    impatient = Checkpoints(run, keep=1)
    Pin(run.checkpoints, "died").hold(2)
    save(impatient, 3)
    assert impatient.prune() == []
    time.sleep(0.4)
    assert [path.name for path in impatient.prune()] == ["step-2"]


def test_a_reader_says_that_it_lives(run, monkeypatch):
    monkeypatch.setattr(checkpoint_reader, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(checkpoint, "PIN_PATIENCE_SECONDS", 0.5)
    checkpoints = Checkpoints(run, keep=1)
    save(checkpoints, 1)
    save(checkpoints, 2)
    with pinned_checkpoint(run, step=1):
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            assert checkpoints.prune() == []
            time.sleep(0.1)
    assert len(checkpoints.prune()) == 1


def test_reading_what_is_not_there(run):
    with pytest.raises(ValueError, match="no complete checkpoint"), pinned_checkpoint(run):
        pass
    save(Checkpoints(run, keep=1), 1)
    with pytest.raises(ValueError, match="no complete checkpoint of step 5; allowed: 1"), pinned_checkpoint(run, 5):
        pass
    assert not list((run.checkpoints / "readers").glob("*"))


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


def test_shares_of_a_verification_cover_every_byte_once_and_wait_for_a_late_view(run):
    path = save(Checkpoints(run, keep=1), 1)
    assert [verify_share(path, index, 5) for index in range(5)] == [[]] * 5, "more ranks than files"
    file = path / "engine" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    found = [verify_share(path, index, 2) for index in range(2)]
    assert sorted(found) == [[], [f"{path}: engine/__1_0.distcp differs from what was written"]]
    data[5] ^= 1
    file.write_bytes(data)
    hidden = path.with_name("hidden")
    path.rename(hidden)
    assert verify_share(path, 0, 1, retry_seconds=0.1) == [f"{path}: has no {MARKER}"]
    timer = threading.Timer(0.5, lambda: hidden.rename(path))
    timer.start()
    assert verify_share(path, 0, 1, retry_seconds=20) == []
    timer.join()


def test_damaged_ones_are_set_aside_with_their_reason(run):
    checkpoints = Checkpoints(run, keep=2)
    save(checkpoints, 1)
    zero_bytes(save(checkpoints, 2))
    (found, problem), (good, nothing) = checkpoints.proposals()
    assert (found.step, good.step, nothing) == (2, 1, "")
    assert "engine/__1_0.distcp has 0 bytes, 1000 were written" in problem
    checkpoints.set_aside([(found, problem)])
    assert [proposal.step for proposal, _ in checkpoints.proposals()] == [1]
    (record,) = run.set_aside.glob("*.reason.json")
    assert "engine/__1_0.distcp has 0 bytes" in record.read_text()


@pytest.mark.timeout(240)
@pytest.mark.trainers
def test_kill_at_any_instant_leaves_a_complete_loadable_newest_one(run):
    """A process that trains and saves beside it; each one loads what the last one left, and checks every value."""
    chance = random.Random(5)
    committed = 0
    for attempt in range(7):
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("checkpoint_process.py")), str(run.path), str(attempt)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdout is not None
        loaded = child.stdout.readline()
        assert loaded == f"loaded {committed}\n", "each attempt goes on from the newest one"
        first = child.stdout.readline()
        time.sleep(chance.uniform(0, 0.4))
        child.kill()
        steps = [int(line) for line in [first, *child.stdout.read().split("\n")[:-1]]]
        child.wait(60)
        found = Checkpoints(run, keep=2, attempt=attempt + 1).latest(deep=True)
        assert found is not None
        committed = found[0]
        assert committed >= steps[-1]
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


def test_a_rank_that_the_saved_run_did_not_have_draws_its_own_numbers():
    def draw(*seeds: int) -> tuple[float, ...]:
        seed_generators(*seeds)
        return random.random(), float(np.random.standard_normal()), float(torch.rand(1))

    assert draw(1, 7, 2) == draw(1, 7, 2)
    assert len({draw(1, 7, 2), draw(1, 7, 3), draw(1, 8, 2)}) == 3
