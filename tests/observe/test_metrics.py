"""Metrics: whole lines, any float, torn ends, resume; TensorBoard reads the same numbers."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from pekoe.pipeline import files
from pekoe.pipeline.observe.append_file import MAX_WAITING
from pekoe.pipeline.observe.metrics import MetricsWriter, event_files, metrics_path, read_metrics, series
from pekoe.pipeline.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def scalars_of(run: RunDirectory, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(run.metrics), size_guidance={TENSORS: 0})
    accumulator.Reload()
    if name not in accumulator.Tags()["tensors"]:
        return []
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in accumulator.Tensors(name)]


def test_lines_come_back_and_are_standard_json(run: RunDirectory) -> None:
    with MetricsWriter(run, 3, tensorboard=False) as writer:
        writer.write(1, {"reward/mean": 0.5, "train/loss": float("nan"), "absent": None}, wall=10.0)
        writer.write(2, {"reward/mean": 1, "train/loss": float("-inf"), "x": float("inf")}, wall=11.5)
    texts = metrics_path(run).read_text().splitlines()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    assert [json.loads(text, parse_constant=refuse)["step"] for text in texts] == [1, 2]
    first, second = read_metrics(run)
    assert (first.step, first.time, first.attempt) == (1, 10.0, 3)
    assert set(first.values) == {"reward/mean", "train/loss"}
    assert math.isnan(first.values["train/loss"])
    assert second.values == {"reward/mean": 1.0, "train/loss": float("-inf"), "x": float("inf")}
    assert series([first, second], "reward/mean") == ([1, 2], [0.5, 1.0])
    assert event_files(run) == []


def test_reserved_names_and_other_things_than_numbers_are_refused(run: RunDirectory) -> None:
    with MetricsWriter(run, 0, tensorboard=False) as writer:
        with pytest.raises(ValueError, match="'step' is reserved"):
            writer.write(1, {"step": 1.0})
        with pytest.raises(ValueError, match="loss = 'much' is not a number"):
            writer.write(1, {"loss": "much"})  # type: ignore[dict-item]
    assert read_metrics(run) == []


@pytest.mark.parametrize("torn", [b'{"step": 2, "ti', b"\x00\x00\x00", b'{"step": 2}\n', b"[1]\n", b"7\n"])
def test_a_torn_or_foreign_line_spoils_no_other(run: RunDirectory, torn: bytes) -> None:
    with MetricsWriter(run, 0, tensorboard=False) as writer:
        writer.write(1, {"a": 1.0})
    with open(metrics_path(run), "ab") as file:
        file.write(torn)
    assert [line.step for line in read_metrics(run)] == [1]
    with MetricsWriter(run, 1, tensorboard=False) as writer:
        writer.write(3, {"a": 3.0})
    assert [line.step for line in read_metrics(run)] == [1, 3]


def test_no_file_gives_no_lines(tmp_path: Path) -> None:
    assert read_metrics(RunDirectory(tmp_path)) == []


def test_several_writes_of_a_step_add_up(run: RunDirectory) -> None:
    with MetricsWriter(run, 0, tensorboard=False) as writer:
        writer.write(1, {"a": 1.0})
        writer.write(2, {"a": 2.0})
        writer.write(1, {"eval/accuracy": 0.25, "a": 5.0})
    assert series(read_metrics(run), "a") == ([1, 2], [5.0, 2.0])
    assert series(read_metrics(run), "eval/accuracy") == ([1], [0.25])


def test_threads_never_tear_a_line(run: RunDirectory) -> None:
    with MetricsWriter(run, 0, tensorboard=False) as writer:

        def work(start: int) -> None:
            for step in range(start, start + 100):
                writer.write(step, {f"name/{index}": index for index in range(30)})

        threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    lines = read_metrics(run)
    assert len({line.step for line in lines}) == len(lines) == 400
    assert all(len(line.values) == 30 for line in lines)


def test_tensorboard_reads_the_same_numbers(run: RunDirectory) -> None:
    with MetricsWriter(run, 0) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": step / 8, "bad": float("nan")})
    assert scalars_of(run, "reward/mean") == [(step, step / 8) for step in range(1, 6)]
    assert all(math.isnan(value) for _, value in scalars_of(run, "bad"))


def test_resume_sets_the_abandoned_future_aside_in_both_files(run: RunDirectory) -> None:
    with MetricsWriter(run, 0) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": step / 8})
    with MetricsWriter(run, 1) as writer:
        assert writer.truncate_after(3) == 2
        writer.write(4, {"reward/mean": 0.75})
    assert [(line.step, line.attempt) for line in read_metrics(run)] == [(1, 0), (2, 0), (3, 0), (4, 1)]
    assert scalars_of(run, "reward/mean") == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.75)]
    aside = sorted(path.name for path in run.set_aside.iterdir() if not path.name.endswith(".reason.json"))
    assert len(aside) == 2
    (kept,) = (name for name in aside if name.endswith(".jsonl"))
    assert [json.loads(text)["step"] for text in (run.set_aside / kept).read_text().splitlines()] == [4, 5]


def test_resume_with_nothing_later_touches_nothing(run: RunDirectory) -> None:
    with MetricsWriter(run, 0) as writer:
        writer.write(1, {"a": 1.0})
    before = [path.read_bytes() for path in (metrics_path(run), *event_files(run))]
    with MetricsWriter(run, 1) as writer:
        assert writer.truncate_after(1) == 0
    assert [path.read_bytes() for path in (metrics_path(run), *event_files(run))] == before


class SmallDisk(files.Disk):
    """Takes `room` bytes more, then as much of a write as fits, then nothing."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: BinaryIO, data: Any) -> None:
        fits = memoryview(data).cast("B")[: max(0, self.room)]
        super().write(file, fits)
        self.room -= len(fits)
        if len(fits) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("room", [0, 1, 20, 300, 700])
def test_a_full_disk_ends_nothing_and_no_line_is_lost(
    room: int, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SmallDisk(room)
    monkeypatch.setattr(files, "disk", disk)
    with MetricsWriter(run, 0) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": step / 8})
        there = [line.step for line in read_metrics(run)]
        assert there == list(range(1, len(there) + 1))
        assert len(there) < 5 or len(scalars_of(run, "reward/mean")) < 5
        assert not metrics_path(run).exists() or metrics_path(run).read_bytes()[-1:] in (b"", b"\n")
        told = [record for record in caplog.records if "NO ROOM" in record.message]
        assert 1 <= len(told) <= 2, "once for each file"
        disk.room = 1 << 20
        writer.write(6, {"reward/mean": 0.75})
    assert series(read_metrics(run), "reward/mean") == ([1, 2, 3, 4, 5, 6], [step / 8 for step in range(1, 7)])
    assert scalars_of(run, "reward/mean") == [(step, step / 8) for step in range(1, 7)]


def test_what_waits_for_room_is_bounded_and_the_oldest_goes_first(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SmallDisk(0)
    monkeypatch.setattr(files, "disk", disk)
    with MetricsWriter(run, 0, tensorboard=False) as writer:
        for step in range(MAX_WAITING + 5):
            writer.write(step, {"a": 1.0})
        disk.room = 1 << 30
        writer.write(MAX_WAITING + 5, {"a": 1.0})
    assert [line.step for line in read_metrics(run)] == list(range(5, MAX_WAITING + 6))
    assert "5 lines were lost" in caplog.text


def test_another_refusal_of_the_disk_is_an_error(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(files.Disk):
        def write(self, file: BinaryIO, data: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files, "disk", Broken())
    with pytest.raises(OSError, match="Input/output"):
        MetricsWriter(run, 0, tensorboard=False).write(1, {"a": 1.0})


@pytest.mark.parametrize("moves", range(6))
def test_a_crash_while_the_future_is_set_aside_is_made_good(
    moves: int, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of renames nothing happens any more; then the next attempt does all of it."""

    class Crash(BaseException):
        pass

    class Dying(files.Disk):
        left = moves

        def rename(self, old: Path, new: Path) -> None:
            if self.left == 0:
                raise Crash
            self.left -= 1
            super().rename(old, new)

    with MetricsWriter(run, 0) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": step / 8})
    monkeypatch.setattr(files, "disk", Dying())
    with pytest.raises(Crash), MetricsWriter(run, 1) as writer:
        writer.truncate_after(3)
    monkeypatch.undo()
    with MetricsWriter(run, 2) as writer:
        writer.truncate_after(3)
        writer.write(4, {"reward/mean": 0.75})
    assert [(line.step, line.attempt) for line in read_metrics(run)] == [(1, 0), (2, 0), (3, 0), (4, 2)]
    assert scalars_of(run, "reward/mean") == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.75)]


def test_writing_metrics_imports_no_torch(run: RunDirectory) -> None:
    code = (
        "import sys; from pathlib import Path; from pekoe.pipeline.run_directory import RunDirectory;"
        "from pekoe.pipeline.observe.metrics import MetricsWriter;"
        "import pekoe.pipeline.observe.status, pekoe.pipeline.observe.report, pekoe.pipeline.observe.progress;"
        "w = MetricsWriter(RunDirectory(Path(sys.argv[1])), 0); w.write(1, {'a': 1.0}); w.close();"
        "print([name for name in ('torch', 'tensorflow', 'mpi4py', 'h5py', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
