"""Writer and store together: publish, read, put aside, collect, resume; and what happens on a bad filesystem."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pekoe.pipeline import files
from pekoe.pipeline.messages import Published
from pekoe.pipeline.records import Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory import writer as writer_module
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import BadShard, Shard
from pekoe.pipeline.trajectory.store import BadRows, Store
from pekoe.pipeline.trajectory.writer import ShardWriter

Make = Callable[..., Group]


def publish(run: RunDirectory, groups: list[Group], attempt: int = 0, writer: str = "rank-1") -> Published:
    shard_writer = ShardWriter(run, ShardAttributes("r", attempt, writer, 1.0))
    for group in groups:
        shard_writer.add(group)
    notice = shard_writer.flush()
    assert notice is not None
    return notice


def keys_of(notice: Published) -> list[tuple[str, int]]:
    return [(notice.path, row.row) for group in notice.groups for row in group.rows]


def test_rows_come_back_in_the_order_asked_over_several_shards(
    run: RunDirectory, make_group: Make, assert_same: Callable[[Trajectory, Trajectory], None]
) -> None:
    written = {number: make_group(number, version=2) for number in range(6)}
    first = publish(run, [written[0], written[1], written[2]])
    second = publish(run, [written[3], written[4], written[5]], writer="rank-2")
    keys = keys_of(first) + keys_of(second)
    expected = [(number, trajectory) for number in range(6) for trajectory in written[number].trajectories]
    order = np.random.default_rng(0).permutation(len(keys))
    store = Store(run)
    found = store.read([keys[index] for index in order])
    for (number, trajectory), index in zip(found, order, strict=True):
        assert number == expected[index][0]
        assert_same(trajectory, expected[index][1])
    assert store.paths() == [first.path, second.path]
    assert [store.notice(path) for path in store.paths()] == [first, second]
    row = first.groups[1].rows[2]
    assert (row.length, row.min_version, row.max_version, row.sample) == (26, 2, 2, 2)
    assert row.num_active == int(written[1].trajectories[2].loss_mask.sum())
    assert row.reward == written[1].trajectories[2].reward


def test_an_empty_writer_publishes_nothing(run: RunDirectory, attributes: ShardAttributes) -> None:
    writer = ShardWriter(run, attributes)
    assert writer.flush() is None
    assert not writer.due()
    assert list(run.shards.iterdir()) == []


def test_a_shard_is_due_when_full_or_old(run: RunDirectory, attributes: ShardAttributes, make_group: Make) -> None:
    writer = ShardWriter(run, attributes, max_groups=2, max_seconds=0.2)
    writer.add(make_group(1))
    assert not writer.due()
    writer.add(make_group(2))
    assert writer.due()
    writer.flush()
    assert not writer.due()
    writer.add(make_group(3))
    time.sleep(0.25)
    assert writer.due()


def test_what_came_together_while_the_disk_refused_goes_into_several_shards(
    run: RunDirectory, attributes: ShardAttributes, make_group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice of a shard must fit into one message."""
    monkeypatch.setattr(writer_module, "MAX_ROWS", 5)
    writer = ShardWriter(run, attributes, max_seconds=1000.0)
    for number in range(6):
        writer.add(make_group(number, samples=3))
    published = []
    while writer.due():
        notice = writer.flush()
        assert notice is not None
        published.append([group.group for group in notice.groups])
    assert published == [[0, 1], [2, 3], [4, 5]]
    assert writer.flush() is None


def test_a_thousand_groups_make_few_files(run: RunDirectory, attributes: ShardAttributes, make_group: Make) -> None:
    writer = ShardWriter(run, attributes, max_groups=256, max_seconds=60)
    notices = []
    for number in range(1000):
        writer.add(make_group(number, samples=1))
        if writer.due():
            notices.append(writer.flush())
    notices.append(writer.flush())
    assert len(list(run.shards.rglob("*.*"))) == 4 == len(notices)
    assert sum(len(notice.groups) for notice in notices if notice) == 1000


def test_concurrent_adds_and_flushes_lose_and_double_nothing(
    run: RunDirectory, attributes: ShardAttributes, make_group: Make
) -> None:
    writer = ShardWriter(run, attributes)
    notices: list[Published] = []

    def work(start: int) -> None:
        for number in range(start, start + 50):
            writer.add(make_group(number, samples=2))
            if number % 7 == 0 and (notice := writer.flush()):
                notices.append(notice)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if (notice := writer.flush()) is not None:
        notices.append(notice)
    numbers = sorted(group.group for notice in notices for group in notice.groups)
    assert numbers == sorted(number for start in (0, 100, 200, 300) for number in range(start, start + 50))
    assert sorted({notice.path for notice in notices}) == Store(run).paths()


def test_a_writer_never_overwrites_what_its_folder_holds(run: RunDirectory, make_group: Make) -> None:
    first = publish(run, [make_group(1)])
    second = publish(run, [make_group(2)])
    assert first.path != second.path
    assert len(Store(run).paths()) == 2


class FaultyFile(io.FileIO):
    def __init__(self, path: Path, code: int, after_bytes: int) -> None:
        super().__init__(path, "w")
        self._code = code
        self._left = after_bytes

    def write(self, data: Any) -> int:
        written = super().write(bytes(data)[: self._left])
        self._left -= written
        if self._left <= 0:
            raise OSError(self._code, os.strerror(self._code))
        return written


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after_bytes", [0, 1, 1000, 10_000])
def test_a_full_disk_keeps_the_groups_and_leaves_no_file(
    run: RunDirectory,
    make_group: Make,
    attributes: ShardAttributes,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    after_bytes: int,
) -> None:
    writer = ShardWriter(run, attributes)
    good = publish(run, [make_group(0)])
    writer.add(make_group(1))
    monkeypatch.setattr(files.disk, "create", lambda path: FaultyFile(path, code, after_bytes))
    with pytest.raises(OSError, match="cannot publish a shard of 1 groups") as caught:
        writer.flush()
    assert caught.value.errno == code
    assert [run.relative(path) for path in run.shards.rglob("*.*")] == [good.path]
    monkeypatch.undo()
    writer.add(make_group(2))
    notice = writer.flush()
    assert notice is not None
    assert [group.group for group in notice.groups] == [1, 2]
    assert len(Store(run).read(keys_of(notice))) == 8


@pytest.mark.parametrize("verb", ["fsync", "rename"])
def test_a_failing_fsync_or_rename_shows_no_file(
    run: RunDirectory, make_group: Make, attributes: ShardAttributes, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    writer = ShardWriter(run, attributes)
    writer.add(make_group(1))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    (run.shards / "0-rank-1").mkdir()
    monkeypatch.setattr(files.os, verb, fail)
    with pytest.raises(OSError, match="I/O error"):
        writer.flush()
    monkeypatch.undo()
    assert list(run.shards.rglob("*.*")) == []
    assert writer.flush() is not None


def test_bad_rows_are_all_named_and_nothing_is_returned(run: RunDirectory, make_group: Make) -> None:
    good, cut, gone = (publish(run, [make_group(number)]) for number in range(3))
    path = run.path / cut.path
    path.write_bytes(path.read_bytes()[:-500])
    (run.path / gone.path).unlink()
    store = Store(run, retry_seconds=0.1)
    with pytest.raises(BadRows) as caught:
        store.read([(cut.path, 1), (good.path, 0), (gone.path, 2), (good.path, 99)])
    reasons = {(shard, row): reason for shard, row, reason in caught.value.rows}
    assert set(reasons) == {(cut.path, 1), (gone.path, 2), (good.path, 0), (good.path, 99)}
    assert "No such file" in reasons[gone.path, 2]
    assert len(store.read([(good.path, 0)])) == 1


def test_damage_after_the_first_read_is_found_by_the_next(run: RunDirectory, make_group: Make) -> None:
    notice = publish(run, [make_group(1, samples=1, length=100_000)])
    store = Store(run)
    store.read(keys_of(notice))
    path = run.path / notice.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadRows, match="checksum"):
        store.read(keys_of(notice))


def test_a_name_that_is_late_or_stale_is_tried_again_for_a_bounded_time(
    run: RunDirectory, make_group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice = publish(run, [make_group(1)])
    real_open = os.open
    failures = iter([errno.ESTALE, errno.ENOENT])

    def late(path: Any, *rest: Any) -> int:
        if str(path).endswith(".h5") and (code := next(failures, 0)):
            raise OSError(code, os.strerror(code), str(path))
        return real_open(path, *rest)

    monkeypatch.setattr(os, "open", late)
    assert len(Store(run).read(keys_of(notice))) == 4
    failures = iter([errno.ESTALE] * 1000)
    started = time.monotonic()
    with pytest.raises(BadRows, match="Stale"):
        Store(run, retry_seconds=0.3).read(keys_of(notice))
    assert time.monotonic() - started < 20


def test_a_quarantined_shard_lies_aside_with_its_reason(run: RunDirectory, make_group: Make) -> None:
    notice = publish(run, [make_group(1)])
    store = Store(run)
    assert store.quarantine(notice.path, "checksum")
    assert not store.quarantine(notice.path, "checksum")
    assert store.num_quarantined == 1
    assert store.paths() == []
    (reason_file,) = run.set_aside.glob("*.reason.json")
    record = json.loads(reason_file.read_text())
    assert (record["path"], record["reason"]) == (notice.path, "checksum")
    (moved,) = (path for path in run.set_aside.iterdir() if path != reason_file)
    assert moved.stat().st_size > 0


def test_collected_shards_are_gone_and_a_second_collection_is_harmless(run: RunDirectory, make_group: Make) -> None:
    first, second = publish(run, [make_group(1)]), publish(run, [make_group(2)])
    store = Store(run, retry_seconds=0)
    store.read(keys_of(first))
    assert store.collect([first.path]) == 1
    assert store.collect([first.path]) == 0
    assert store.paths() == [second.path]
    with pytest.raises(BadRows):
        store.read(keys_of(first))


def test_resume_adopts_what_is_old_enough_and_sets_the_rest_aside(run: RunDirectory, make_group: Make) -> None:
    old = publish(run, [make_group(1, version=3)])
    future = publish(run, [make_group(2, version=3), make_group(3, version=4)])
    cut = publish(run, [make_group(4)])
    (run.path / cut.path).write_bytes(b"")
    unknown = publish(run, [make_group(5)], writer="rank-2")
    (run.shards / "0-rank-2" / "000001.h5.99.part").write_bytes(b"half")
    own = publish(run, [make_group(6)], attempt=1)
    store = Store(run)
    adopted = [notice for notice in store.adoptable(3, lambda _: True).notices if notice.path != own.path]
    assert [notice.path for notice in adopted] == [old.path, unknown.path]
    assert store.num_quarantined == 1
    assert future.path not in store.paths()
    assert store.set_aside_unknown(1, [old.path]) == [unknown.path]
    assert store.paths() == [old.path, own.path]
    assert not (run.shards / "0-rank-2").exists()
    assert len([path for path in run.set_aside.iterdir() if not path.name.endswith(".json")]) == 3


def test_resume_reads_only_shards_with_a_group_that_is_still_open(run: RunDirectory, make_group: Make) -> None:
    notices = [publish(run, [make_group(2 * n, samples=1, length=40_000), make_group(2 * n + 1)]) for n in range(6)]
    paths = [notice.path for notice in notices]
    for name in (paths[0], paths[4]):
        data = bytearray((run.path / name).read_bytes())
        with Shard(run.path / name) as shard:
            data[shard.addresses["turn"] + 80_000] ^= 1
        (run.path / name).write_bytes(data)
    (run.path / paths[1]).write_bytes(b"")
    still_open = {2 * 3, 2 * 4 + 1, 2 * 5}
    store = Store(run)
    found = store.adoptable(0, lambda group: group in still_open)
    assert found.notices == [notices[3], notices[5]]
    assert found.spent == [paths[0], paths[2]], "damage that nobody will read is no matter"
    assert store.num_quarantined == 2
    assert store.paths() == [paths[0], paths[2], paths[3], paths[5]]


def test_open_files_are_bounded(run: RunDirectory, make_group: Make) -> None:
    notices = [publish(run, [make_group(number, samples=1)]) for number in range(40)]
    store = Store(run, open_shards=4)
    before = len(os.listdir("/proc/self/fd"))
    store.read([(notice.path, 0) for notice in notices])
    assert len(os.listdir("/proc/self/fd")) - before <= 4
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def read_in_child(store: Store, keys: list[tuple[str, int]], answers: Any) -> None:
    answers.put([(group, trajectory.tokens.tobytes()) for group, trajectory in store.read(keys)])


def test_a_handle_that_crossed_a_fork_reads_the_truth(run: RunDirectory, make_group: Make) -> None:
    notice = publish(run, [make_group(number, samples=50) for number in range(20)])
    store = Store(run)
    keys = keys_of(notice)
    truth = [(group, trajectory.tokens.tobytes()) for group, trajectory in store.read(keys)]
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=read_in_child, args=(store, keys, answers)) for _ in range(4)]
    for child in children:
        child.start()
    for _ in children:
        assert answers.get(timeout=60) == truth
    for child in children:
        child.join(timeout=90)
    assert [(group, trajectory.tokens.tobytes()) for group, trajectory in store.read(keys)] == truth


WRITE_FOREVER = """
import sys
from pathlib import Path
import numpy as np
from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.writer import ShardWriter

length = 20_000
mask = np.ones(length, np.uint8)
mask[0] = 0
versions = np.where(mask, 0, -1).astype(np.int32)
def group(number):
    tokens, logprobs = np.full(length, number, np.int32), -mask.astype(np.float32)
    return Group(number, 0, "x", [Trajectory(tokens, mask, logprobs, versions, versions, 1, 1.0, Finish.STOP)])
writer = ShardWriter(RunDirectory(Path(sys.argv[1])), ShardAttributes("r", 0, sys.argv[2], 1.0))
print("ready", flush=True)
for number in range(100_000):
    writer.add(group(number))
    notice = writer.flush()
    print(notice.path, flush=True)
"""


@pytest.fixture
def writing_process(run: RunDirectory) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(writer: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITE_FOREVER, str(run.path), writer]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=60)


def test_a_writer_killed_at_any_instant_leaves_only_whole_shards(
    run: RunDirectory, writing_process: Callable[[str], subprocess.Popen[str]]
) -> None:
    rng = np.random.default_rng(0)
    deadline = time.monotonic() + 10
    kills = 0
    while time.monotonic() < deadline and kills < 12:
        process = writing_process(f"rank-{kills}")
        time.sleep(float(rng.uniform(0.005, 0.08)))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL
        assert process.stdout is not None
        announced = process.stdout.read().split()
        kills += 1
        store = Store(run)
        assert set(announced) <= set(store.paths()), "an announced shard is missing"
        for name in store.paths():
            store.notice(name)
    assert kills >= 3
    assert store.paths(), "no shard was ever published"


def test_a_reader_that_polls_while_shards_are_written_sees_only_whole_ones(
    run: RunDirectory, writing_process: Callable[[str], subprocess.Popen[str]]
) -> None:
    writing_process("rank-1")
    seen: set[str] = set()
    deadline = time.monotonic() + 20
    while len(seen) < 60 and time.monotonic() < deadline:
        for path in set(Store(run).paths()) - seen:
            with Shard(run.path / path) as shard:
                shard.verify()
                (number, trajectory), *_ = shard.read([0])
                assert (trajectory.tokens == number).all()
            seen.add(path)
    assert len(seen) >= 60


def test_there_is_no_way_to_write_into_a_published_shard(run: RunDirectory, make_group: Make) -> None:
    notice = publish(run, [make_group(1)])
    with Shard(run.path / notice.path) as shard:
        assert shard._hdf5.mode == "r"
        with pytest.raises(Exception, match=r"(?i)no write intent|read.only|unable"):
            shard._hdf5.create_group("more")
    sources = [path.read_text() for path in Path(sys.modules[Shard.__module__].__file__ or "").parent.glob("*.py")]
    for forbidden in ("swmr", '"r+"', '"a"', "mpio"):
        assert not any(forbidden in source.lower() for source in sources), forbidden


def test_bad_shard_carries_path_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(b"short")
    with pytest.raises(BadShard) as caught:
        Shard(path)
    assert caught.value.path == path
    assert "truncated" in caught.value.reason


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_flat_over_a_thousand_steps_of_a_megabyte(
    run: RunDirectory, attributes: ShardAttributes, make_group: Make
) -> None:
    writer = ShardWriter(run, attributes)
    store = Store(run, open_shards=4)
    group = make_group(1, samples=1, length=60_000)
    published: list[str] = []
    after_warm_up, most_files = 0, 0
    for step in range(1000):
        writer.add(group)
        notice = writer.flush()
        assert notice is not None
        store.read(keys_of(notice))
        published.append(notice.path)
        if len(published) == 10:
            most_files = max(most_files, sum(path.is_file() for path in run.shards.rglob("*")))
            assert store.collect(published) == 10
            published = []
        if step == 50:
            after_warm_up = resident_bytes()
    assert resident_bytes() - after_warm_up < 50 * 2**20
    assert most_files == 10


def test_log_probs_at_another_temperature_are_refused(run: RunDirectory, make_group: Make) -> None:
    notice = publish(run, [make_group(0)])
    assert len(Store(run, temperature=1.0).read(keys_of(notice))) == 4
    with pytest.raises(BadRows, match=r"log-probs at temperature 1.0, wanted gconfig.temperature 0.6"):
        Store(run, temperature=0.6).read(keys_of(notice))
