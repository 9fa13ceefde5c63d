"""What is written is what is read, for any groups, in any order of rows, by our reader and by plain HDF5."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pekoe.pipeline.messages import PublishedGroup, Row
from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import BadShard, Shard, encode_shard, write_shard

Same = Callable[[Trajectory, Trajectory], None]
finite_logprob = st.floats(-50, 0, width=32)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(2, 40))
    prompt = draw(st.integers(1, length - 1))
    mask = np.zeros(length, np.uint8)
    mask[prompt:] = draw(st.lists(st.integers(0, 1), min_size=length - prompt, max_size=length - prompt))
    mask[-1] = 1
    active = mask.astype(bool)
    logprobs = draw(st.lists(finite_logprob, min_size=length, max_size=length))
    versions = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
    return Trajectory(
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
        loss_mask=mask,
        logprobs=np.where(active, np.array(logprobs, np.float32), 0).astype(np.float32),
        versions=np.where(active, versions, -1).astype(np.int32),
        turns=np.where(active, 3, -1).astype(np.int32),
        prompt_length=prompt,
        reward=draw(st.floats(-(2.0**90), 2.0**90, width=32)),
        finish=draw(st.sampled_from(Finish)),
        seed=draw(st.integers(0, 2**63 - 1)),
        sample=draw(st.integers(0, 1000)),
        info=draw(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.booleans(), max_size=3)),
    )


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    numbers = draw(st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=4, unique=True))
    names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)
    return [
        Group(number, draw(st.integers(0, 5)), draw(names), draw(st.lists(trajectories(), min_size=1, max_size=3)))
        for number in numbers
    ]


def notice_by_hand(written: list[Group]) -> tuple[PublishedGroup, ...]:
    """Token by token, as the words of the record say it."""
    rows = itertools.count()
    return tuple(
        PublishedGroup(
            group.number,
            group.try_number,
            tuple(
                row_by_hand(next(rows), trajectory, before)
                for before, trajectory in zip([None, *group.trajectories], group.trajectories, strict=False)
            ),
        )
        for group in written
    )


def row_by_hand(row: int, trajectory: Trajectory, before: Trajectory | None) -> Row:
    alike = zip(before.tokens[:-1], trajectory.tokens[:-1], strict=False) if before is not None else ()
    versions = [int(v) for v, active in zip(trajectory.versions, trajectory.loss_mask, strict=True) if active]
    return Row(
        row=row,
        sample=trajectory.sample,
        length=len(trajectory.tokens),
        num_active=len(versions),
        reward=trajectory.reward,
        min_version=min(versions),
        max_version=max(versions),
        truncated=trajectory.finish == Finish.LENGTH,
        num_shared=len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], alike))),
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(written=groups(), data=st.data())
def test_any_groups_come_back(
    tmp_path: Path, attributes: ShardAttributes, assert_same: Same, written: list[Group], data: st.DataObject
) -> None:
    path = tmp_path / "000000.h5"
    path.unlink(missing_ok=True)
    notice = write_shard(path, written, attributes).groups
    expected = [(group.number, trajectory) for group in written for trajectory in group.trajectories]
    with Shard(path) as shard:
        assert shard.attributes == attributes
        assert shard.num_rows == len(expected)
        assert shard.num_tokens == sum(len(trajectory.tokens) for _, trajectory in expected)
        rows = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=8))
        for row, (number, trajectory) in zip(rows, shard.read(rows), strict=True):
            assert number == expected[row][0]
            assert_same(trajectory, expected[row][1])
        assert [(g.number, g.try_number, g.example) for g in shard.groups()] == [
            (g.number, g.try_number, g.example) for g in written
        ]
        assert shard.notice() == notice == shard.verify() == notice_by_hand(written)


def test_the_layout_is_plain_hdf5_with_the_documented_names(
    tmp_path: Path, attributes: ShardAttributes, make_group: Callable[..., Group]
) -> None:
    path = tmp_path / "000000.h5"
    write_shard(path, [make_group(7), make_group(8)], attributes)
    with h5py.File(path, "r", locking=False) as file:
        assert dict(file.attrs) == {
            "schema_version": 1,
            "run": "test/run",
            "attempt": 0,
            "writer": "rank-1",
            "temperature": 0.7,
            "logprob_convention": "token-aligned, at the sampling temperature, full vocabulary",
        }
        dtypes = {name: column.dtype.str[1:] for name, column in file["tokens"].items()}
        assert dtypes == {"id": "i4", "loss_mask": "u1", "logprob": "f4", "version": "i4", "turn": "i4"}
        assert set(file["sequences"]) == {
            *("offset", "group", "try", "sample", "seed", "prompt_length", "reward", "truncated", "finish"),
            *("example", "info"),
        }
        assert all(column.chunks is None and column.compression is None for column in file["tokens"].values())
        assert list(file["sequences/group"]) == [7] * 4 + [8] * 4


def test_equal_groups_give_equal_bytes(attributes: ShardAttributes, make_group: Callable[..., Group]) -> None:
    assert encode_shard([make_group(1)], attributes) == encode_shard([make_group(1)], attributes)


def test_a_shard_of_nothing_and_an_unsound_trajectory_are_refused(
    tmp_path: Path, attributes: ShardAttributes, make_group: Callable[..., Group]
) -> None:
    with pytest.raises(ValueError, match="no trajectory"):
        write_shard(tmp_path / "a.h5", [Group(1, 0, "x", [])], attributes)
    group = make_group(1)
    group.trajectories[0].logprobs[-1] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        write_shard(tmp_path / "a.h5", [group], attributes)
    assert list(tmp_path.iterdir()) == []


def test_rows_outside_and_unpublished_names_are_refused(
    tmp_path: Path, attributes: ShardAttributes, make_group: Callable[..., Group]
) -> None:
    path = tmp_path / "000000.h5"
    write_shard(path, [make_group(1)], attributes)
    with Shard(path) as shard:
        for row in (-1, 4):
            with pytest.raises(BadShard, match=f"row {row} of 4"):
                shard.read([row])
    with pytest.raises(BadShard, match="published"):
        Shard(tmp_path / "000000.h5.77.part")


@pytest.mark.parametrize("layout", ["many short rows", "one very long row"])
def test_reading_a_row_touches_little_more_than_its_bytes(
    tmp_path: Path, attributes: ShardAttributes, make_group: Callable[..., Group], layout: str
) -> None:
    short = [make_group(number, samples=50, length=400) for number in range(40)]
    written = short if layout == "many short rows" else [*short[:20], make_group(99, 1, 500_000), *short[20:]]
    path = tmp_path / "000000.h5"
    size = write_shard(path, written, attributes).num_bytes
    assert size < 17 * sum(len(t.tokens) for g in written for t in g.trajectories) + 400 * 50 * 41
    with Shard(path) as shard:
        before = shard.bytes_read
        shard.read([shard.num_rows // 2 + 3])
        assert shard.bytes_read - before < 17 * 450 + 12 * 2 * 16_384
        before = shard.bytes_read
        shard.read(range(shard.num_rows))
        assert shard.bytes_read - before < 1.5 * size


NO_LOCKS = """
import ctypes, fcntl, errno, sys
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = fcntl.lockf = refuse
from pathlib import Path
from pekoe.pipeline.trajectory.shard import Shard
with Shard(Path(sys.argv[1])) as shard:
    print(shard.num_rows, len(shard.read([0])))
"""

REFUSING_FLOCK = """
#include <errno.h>
int flock(int descriptor, int operation) { (void)descriptor; (void)operation; errno = ENOLCK; return -1; }
"""


def test_a_filesystem_without_locks_needs_no_user_action(
    tmp_path: Path, attributes: ShardAttributes, make_group: Callable[..., Group]
) -> None:
    path = tmp_path / "000000.h5"
    write_shard(path, [make_group(1)], attributes)
    (tmp_path / "flock.c").write_text(REFUSING_FLOCK)
    library = tmp_path / "flock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "flock.c")], check=True, timeout=60)
    writable = h5py_open_result(library, path, locking=True)
    assert "unable to lock file" in writable, f"the stand-in for a lockless filesystem does not work: {writable}"
    done = subprocess.run(
        [sys.executable, "-c", NO_LOCKS, str(path)],
        env={"LD_PRELOAD": str(library), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["4", "1"], done.stderr


def h5py_open_result(library: Path, path: Path, locking: bool) -> str:
    code = f"import h5py; h5py.File({str(path)!r}, 'r', locking={locking})"
    env = {"LD_PRELOAD": str(library), "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60).stderr


def test_the_lock_switch_is_inherited_by_helper_processes() -> None:
    code = (
        "import pekoe.pipeline.trajectory.shard, subprocess, sys;"
        "print(subprocess.run([sys.executable, '-c',"
        "\"import os; print(os.environ['HDF5_USE_FILE_LOCKING'])\"], capture_output=True, text=True).stdout)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "FALSE"
