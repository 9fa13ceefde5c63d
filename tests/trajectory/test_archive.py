"""The archive: few large files, nothing lost and nothing doubled whatever happens in between."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
import pytest

from pekoe.pipeline import files
from pekoe.pipeline.records import Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.archive import Archive, archive_files
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import Shard
from pekoe.pipeline.trajectory.store import Store
from pekoe.pipeline.trajectory.writer import ShardWriter

Make = Callable[..., Group]
Same = Callable[[Trajectory, Trajectory], None]


def publish(run: RunDirectory, groups: list[Group], writer: str = "rank-1", temperature: float = 1.0) -> str:
    shard_writer = ShardWriter(run, ShardAttributes("r", 0, writer, temperature))
    for group in groups:
        shard_writer.add(group)
    notice = shard_writer.flush()
    assert notice is not None
    return notice.path


def held(run: RunDirectory) -> list[tuple[int, str]]:
    """(group, source) of every row in the archives."""
    found = []
    for path in archive_files(run):
        with Shard(path) as archive:
            archive.verify()
            numbers = archive.group_numbers()
            for source in archive.sources():
                found += [(number, source.shard) for number in numbers[source.first_row : source.end_row]]
    return found


def assert_each_once(run: RunDirectory, names: dict[int, str], samples: int) -> None:
    """Every group lies in its shard or in one archive; what lies in both is still to be deleted."""
    rows = Counter(held(run))
    assert set(rows.values()) <= {samples}, "a row lies in the archives twice"
    there = set(Store(run).paths())
    for number, name in names.items():
        assert name in there or rows[number, name] == samples, f"group {number} is lost"


def test_spent_shards_lie_in_one_file_of_the_same_schema(
    run: RunDirectory, make_group: Make, assert_same: Same
) -> None:
    written = {number: make_group(number, samples=3, version=number) for number in range(5)}
    names = [
        publish(run, [written[0], written[1]]),
        publish(run, [written[2]], "rank-2"),
        publish(run, [written[3], written[4]]),
    ]
    archive = Archive(run)
    archive.add(names)
    assert archive.flush(60)
    assert Store(run).paths() == []
    (path,) = archive_files(run)
    assert run.relative(path) == "archive/000000.h5"
    with Shard(path) as shard:
        shard.verify()
        assert [(name, *ends) for name, _, *ends in shard.sources()] == [
            (names[0], 0, 6),
            (names[1], 6, 9),
            (names[2], 9, 15),
        ]
        assert (shard.attributes.run, shard.attributes.writer) == ("r", "archive")
        groups = shard.groups()
        assert [(group.number, group.example) for group in groups] == [(n, f"data/{n}") for n in range(5)]
        for group in groups:
            for found, expected in zip(group.trajectories, written[group.number].trajectories, strict=True):
                assert_same(found, expected)
    with h5py.File(path, "r", locking=False) as plain:
        assert plain["sources/shard"].asstr()[1] == names[1]
    assert archive.close(60)


def test_an_archive_is_written_when_there_is_enough_for_it(run: RunDirectory, make_group: Make) -> None:
    names = [publish(run, [make_group(number, samples=1, length=4000)]) for number in range(12)]
    size = (run.path / names[0]).stat().st_size
    archive = Archive(run, target_bytes=4 * size)
    archive.add(names[:3])
    time.sleep(0.3)
    assert archive_files(run) == []
    archive.add(names[3:10])
    deadline = time.monotonic() + 30
    while len(archive_files(run)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(archive_files(run)) == 2
    archive.add(names[10:])
    assert archive.close(60)
    assert len(archive_files(run)) == 3
    assert Counter(held(run)) == Counter(dict(enumerate(names)).items())


def test_shards_sampled_at_another_temperature_lie_in_another_file(run: RunDirectory, make_group: Make) -> None:
    names = [publish(run, [make_group(1)], temperature=1.0), publish(run, [make_group(2)], temperature=0.7)]
    archive = Archive(run)
    archive.add(names)
    assert archive.close(60)
    temperatures = []
    for path in archive_files(run):
        with Shard(path) as shard:
            temperatures.append((shard.attributes.temperature, shard.group_numbers()[0]))
    assert temperatures == [(1.0, 1), (0.7, 2)]


def test_a_damaged_or_vanished_source_does_not_hold_the_others_up(run: RunDirectory, make_group: Make) -> None:
    names = [publish(run, [make_group(number, samples=1)]) for number in range(4)]
    damaged = bytearray((run.path / names[1]).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (run.path / names[1]).write_bytes(damaged)
    (run.path / names[2]).unlink()
    archive = Archive(run)
    archive.add(names)
    assert archive.close(60)
    assert {name for _, name in held(run)} == {names[0], names[3]}
    assert [path.name for path in run.set_aside.glob("*.h5")] == [names[1].replace("/", "__")]
    assert Store(run).paths() == []


def test_archives_of_the_abandoned_future_are_set_aside(run: RunDirectory, make_group: Make) -> None:
    names = [publish(run, [make_group(number, samples=1)]) for number in range(4)]
    for pair in (names[:2], names[2:]):
        archive = Archive(run)
        archive.add(pair)
        assert archive.close(60)
    assert Archive(run).set_aside_after(set(names[:3])) == ["archive/000001.h5"]
    assert {name for _, name in held(run)} == set(names[:2])
    (reason,) = [path.read_text() for path in run.set_aside.glob("*.reason.json")]
    assert names[3] in reason


def test_a_later_shard_under_a_name_that_was_archived_is_not_taken_for_the_earlier_one(
    run: RunDirectory, make_group: Make
) -> None:
    for number in (1, 2):
        archive = Archive(run)
        archive.add([publish(run, [make_group(number, samples=1)])])
        assert archive.close(60)
    assert held(run) == [(1, "shards/0-rank-1/000000.h5"), (2, "shards/0-rank-1/000000.h5")]


def test_a_damaged_archive_is_set_aside_before_the_next_is_written(run: RunDirectory, make_group: Make) -> None:
    names = [publish(run, [make_group(number, samples=1)]) for number in range(2)]
    first = Archive(run)
    first.add(names[:1])
    assert first.close(60)
    (path,) = archive_files(run)
    path.write_bytes(path.read_bytes()[:-1])
    second = Archive(run)
    second.add(names[1:])
    assert second.close(60)
    assert {name for _, name in held(run)} == {names[1]}
    assert len(list(run.set_aside.glob("archive__*.h5"))) == 1


class CountingDisk(files.Disk):
    """Counts operations; from the one numbered `broken` on it fails: for good (a crash), or that one only."""

    def __init__(self, broken: int, code: int, for_good: bool) -> None:
        self.count = 0
        self._broken, self._code, self._for_good = broken, code, for_good

    def _step(self) -> None:
        number, self.count = self.count, self.count + 1
        if number == self._broken or (self._for_good and number > self._broken):
            raise OSError(self._code, os.strerror(self._code))

    def create(self, path: Path) -> BinaryIO:
        self._step()
        return super().create(path)

    def write(self, file: BinaryIO, data: Any) -> None:
        if self.count == self._broken:
            super().write(file, memoryview(data).cast("B")[: len(data) // 2])
        self._step()
        super().write(file, data)

    def sync(self, descriptor: int) -> None:
        self._step()
        super().sync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        self._step()
        super().sync_folder(folder)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)


@pytest.mark.parametrize("for_good", [True, False], ids=["crash", "one refusal"])
def test_at_every_operation_nothing_is_lost_and_nothing_doubled(
    tmp_path: Path, make_group: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, for_good: bool
) -> None:
    caplog.set_level(logging.CRITICAL)
    sound = files.disk
    first = RunDirectory(tmp_path / "first")
    first.create()
    names = {number: publish(first, [make_group(number, samples=2)]) for number in range(3)}
    for broken in itertools.count():
        run = RunDirectory(tmp_path / str(broken))
        shutil.copytree(first.path, run.path)
        disk = CountingDisk(broken, errno.ENOSPC, for_good)
        monkeypatch.setattr(files, "disk", disk)
        archive = Archive(run, target_bytes=2 * (run.path / names[0]).stat().st_size, retry_seconds=3600)
        archive.add(names.values())
        archive.flush(60)
        monkeypatch.setattr(files, "disk", sound)
        if disk.count <= broken:
            break
        assert_each_once(run, names, samples=2)
        again = archive if not for_good else Archive(run)
        again.add(set(names.values()) & set(Store(run).paths()))
        assert again.close(60)
        archive.close(1)
        assert Counter(held(run)) == Counter(dict.fromkeys(names.items(), 2)), broken
        assert Store(run).paths() == []
    assert broken > 15, "the disk was hardly used"
    assert not list(run.archive.glob(f"*{files.PART}"))


ARCHIVE_ALL = """
import sys
from pathlib import Path
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.archive import Archive
from pekoe.pipeline.trajectory.store import Store

run = RunDirectory(Path(sys.argv[1]))
archive = Archive(run, target_bytes=int(sys.argv[2]))
print("ready", flush=True)
archive.add(Store(run).paths())
sys.exit(0 if archive.close(60) else 1)
"""


@pytest.fixture
def archiving(run: RunDirectory) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(target_bytes: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ARCHIVE_ALL, str(run.path), str(target_bytes)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=60)


def test_killed_at_random_instants_it_loses_and_doubles_nothing(
    run: RunDirectory, make_group: Make, archiving: Callable[[int], subprocess.Popen[str]]
) -> None:
    names = {number: publish(run, [make_group(number, samples=2, length=3000)]) for number in range(120)}
    target = 5 * (run.path / names[0]).stat().st_size
    rng = np.random.default_rng(0)
    kills, deadline = 0, time.monotonic() + 60
    while kills < 8 and time.monotonic() < deadline:
        process = archiving(target)
        time.sleep(float(rng.uniform(0.0, 0.06)))
        os.kill(process.pid, signal.SIGKILL)
        if process.wait(timeout=60) == 0:
            break
        kills += 1
        assert_each_once(run, names, samples=2)
    assert kills >= 2
    assert archiving(target).wait(timeout=60) == 0
    assert Counter(held(run)) == Counter(dict.fromkeys(names.items(), 2))
    assert Store(run).paths() == []
    assert not list(run.archive.glob(f"*{files.PART}"))


def test_a_full_disk_keeps_the_originals_until_there_is_room(
    run: RunDirectory, make_group: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [publish(run, [make_group(number, samples=1)]) for number in range(3)]
    sound = files.disk
    monkeypatch.setattr(files, "disk", CountingDisk(0, errno.EDQUOT, for_good=True))
    archive = Archive(run, target_bytes=1, retry_seconds=0.2)
    archive.add(names)
    assert not archive.flush(30)
    assert Store(run).paths() == names
    assert "the disk is full" in caplog.text
    monkeypatch.setattr(files, "disk", sound)
    deadline = time.monotonic() + 30
    while Store(run).paths() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert Store(run).paths() == []
    assert archive.close(60)
    assert Counter(held(run)) == Counter(dict(enumerate(names)).items())


def test_memory_is_bounded_by_pieces_not_by_the_file(run: RunDirectory, make_group: Make) -> None:
    group = make_group(1, samples=4, length=100_000)
    names = [publish(run, [group]) for _ in range(10)]
    total = sum((run.path / name).stat().st_size for name in names)
    archive = Archive(run)
    tracemalloc.start()
    try:
        archive.add(names)
        assert archive.close(60)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert archive_files(run)[0].stat().st_size > 0.99 * total
    assert peak < total / 2, f"{peak} bytes at the most for a file of {total}"
