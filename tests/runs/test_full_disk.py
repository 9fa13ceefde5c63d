"""A disk that is full in the middle of a real run: it pauses, says so, and goes on when there is room; nothing is lost.

The run directory lies on a small tmpfs; a file that takes all that is left plays the other users of the disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import Outcome, base_overrides, run
from test_death import error_records, start, wait_for_step

from pekoe.launch.cli import main

STEPS = 40
DISK_MIB = 24


@dataclass
class SmallDisk:
    """A mounted tmpfs and the run on it."""

    root: Path
    """Outside of it: output, configuration."""
    path: Path

    @property
    def run(self) -> Path:
        return self.path / "test" / "full"

    @property
    def output(self) -> str:
        return (self.root / "output.txt").read_text()

    def fill(self, leave: int = 0) -> None:
        """Takes all but `leave` bytes."""
        with open(self.path / "filler", "ab", buffering=0) as file, suppress(OSError):
            while True:
                facts = os.statvfs(self.path)
                room = facts.f_bavail * facts.f_frsize - leave
                if room < facts.f_frsize:
                    return
                file.write(bytes(min(room, 1 << 20)))

    def free(self) -> None:
        (self.path / "filler").unlink()

    def steps(self) -> int:
        return len(list((self.run / "ledger").glob("step-*.json")))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Unmounted at the end, also where the test fails."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(tmp_path, path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def overrides_of(disk: SmallDisk, model: Path, data: Path, **more: Any) -> dict[str, Any]:
    return {
        **base_overrides(disk.path, model, data, "full"), "total_train_epochs": 10, "total_train_steps": STEPS,
        "recover.freq_steps": 4, **more,
    }  # fmt: skip


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], disk: SmallDisk, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the run ended with {process.poll()}: {disk.output[-3000:]}"
        assert time.monotonic() < deadline, f"not within {seconds} s: {disk.output[-3000:]}"
        time.sleep(0.05)


def status_of(disk: SmallDisk, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["status", str(disk.run)]) == 0
    return capsys.readouterr().out


def check_nothing_lost(disk: SmallDisk, attempts: set[int]) -> None:
    outcome = Outcome(0, disk.output, disk.run)
    assert [line["step"] for line in outcome.steps] == list(range(1, STEPS + 1))
    assert {line["attempt"] for line in outcome.steps} == attempts
    consumed = [group for step in outcome.consumed() for group in step]
    assert len(consumed) == len(set(consumed)) == 4 * STEPS
    epochs = [sorted(group & ((1 << 40) - 1) for group in consumed if group >> 40 == epoch) for epoch in range(4)]
    assert epochs == [list(range(40))] * 4
    assert (disk.run / "checkpoints" / f"step-{STEPS}" / "COMPLETE.json").exists()
    for folder in ("shards", "ledger", "checkpoints", "exports", "metrics"):
        assert not list((disk.run / folder).glob("**/*.part")), "only complete files stay"


@pytest.mark.timeout(240)
def test_a_full_disk_pauses_the_run_until_there_is_room(
    disk: SmallDisk, tiny_model: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(disk.root, overrides_of(disk, tiny_model, sums))
    try:
        wait_for_step(disk.run, 5, process)
        disk.fill()
        wait_until(lambda: "disk is full" in disk.output, process, disk, 60)
        wait_until(lambda: "paused: disk is full" in status_of(disk, capsys), process, disk, 60)
        time.sleep(3)
        before = disk.steps()
        time.sleep(4)
        assert disk.steps() == before < STEPS, "nothing goes on without room"
        assert process.poll() is None, disk.output[-3000:]
        assert not error_records(disk.run)
        disk.free()
        assert process.wait(timeout=120) == 0, disk.output[-3000:]
    finally:
        process.kill()
        process.wait()
    assert "there is room on the disk again" in disk.output
    assert not error_records(disk.run)
    check_nothing_lost(disk, {0})
    assert main(["doctor", str(disk.run), "--deep"]) == 0


@pytest.mark.timeout(240)
def test_a_checkpoint_that_finds_no_room_is_tried_again(disk: SmallDisk, tiny_model: Path, sums: Path) -> None:
    """Shards and the ledger still fit."""
    process = start(disk.root, overrides_of(disk, tiny_model, sums))
    try:
        wait_for_step(disk.run, 5, process)
        disk.fill(leave=400 << 10)
        wait_until(lambda: "checkpoint of version" in disk.output and "disk is full" in disk.output, process, disk, 60)
        whole = [path.parent.name for path in (disk.run / "checkpoints").glob("step-*/COMPLETE.json")]
        assert whole, "the last good one is still there"
        time.sleep(3)
        disk.free()
        assert process.wait(timeout=120) == 0, disk.output[-3000:]
    finally:
        process.kill()
        process.wait()
    assert not error_records(disk.run)
    check_nothing_lost(disk, {0})


@pytest.mark.timeout(300)
def test_a_disk_that_stays_full_ends_the_run_with_a_clear_record_and_it_can_be_resumed(
    disk: SmallDisk, tiny_model: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = overrides_of(disk, tiny_model, sums, **{"cluster.full_disk_seconds": 3})
    process = start(disk.root, overrides)
    try:
        wait_for_step(disk.run, 9, process)
        disk.fill()
        assert process.wait(timeout=120) == 1, disk.output[-3000:]
    finally:
        process.kill()
        process.wait()
    (record,) = error_records(disk.run)
    assert "disk is full" in record["error"]
    assert "cluster.full_disk_seconds" in record["error"]
    assert [path.parent.name for path in (disk.run / "checkpoints").glob("step-*/COMPLETE.json")]
    capsys.readouterr()
    assert main(["doctor", str(disk.run)]) == 1
    assert f"free space (df -h {disk.run}" in capsys.readouterr().out
    disk.free()
    outcome = run(disk.path, overrides, resume=True)
    assert outcome.code == 0, outcome.text
    check_nothing_lost(disk, {0, 1})
    assert json.loads((disk.run / "run.json").read_text())["attempts"][1]["number"] == 1
