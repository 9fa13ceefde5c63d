"""Groups on their way through the memory of a node: nothing changes, nothing is lost, nothing grows or stays behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pekoe.pipeline.records import Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.hand_over import MEMORY, HandOver, decode, encode

Make = Callable[..., Group]


def open_one(run: RunDirectory, memory: Path, rank: int = 3, attempt: int = 0, **more: int) -> HandOver:
    return HandOver(run, attempt, "41_7", rank, 1, memory=memory, **more)


def test_groups_come_out_as_they_went_in(
    run: RunDirectory, tmp_path: Path, make_group: Make, assert_same: Callable[[Trajectory, Trajectory], None]
) -> None:
    groups = [make_group(number, samples=number + 1, try_number=number) for number in range(3)]
    groups[1].example = "half a pair \udc80"
    groups[2].trajectories[0].info = {"score": float("inf"), "of": ["größer", None]}
    member, writer = open_one(run, tmp_path), open_one(run, tmp_path, rank=1)
    path = member.put(groups)
    assert path is not None
    found = writer.take(path)
    assert not Path(path).exists(), "read once"
    assert [(g.number, g.try_number, g.example) for g in found] == [(g.number, g.try_number, g.example) for g in groups]
    for left, right in zip(found, groups, strict=True):
        for one, other in zip(left.trajectories, right.trajectories, strict=True):
            one.check()
            assert_same(one, other)
    assert decode(encode([])) == []


def test_a_folder_says_whose_it_is_and_goes_with_its_owner(run: RunDirectory, tmp_path: Path, make_group: Make) -> None:
    member = open_one(run, tmp_path, attempt=2)
    path = member.put([make_group(0)])
    assert path is not None
    folder = Path(path).parent
    assert folder.name.startswith(f"pekoe-groups-{os.getuid()}-41_7-")
    assert folder.name.endswith(f"-attempt-2-rank-3-{os.getpid()}")
    assert folder.stat().st_mode & 0o777 == 0o700
    member.close()
    assert not folder.exists()


def test_what_is_not_taken_is_bounded(run: RunDirectory, tmp_path: Path, make_group: Make) -> None:
    size = len(encode([make_group(0)]))
    member, writer = open_one(run, tmp_path, max_bytes=2 * size + 10), open_one(run, tmp_path, rank=1)
    paths = [member.put([make_group(0)]) for _ in range(3)]
    assert paths[2] is None
    assert paths[0] is not None
    writer.take(paths[0])
    assert member.put([make_group(0)]) is not None, "taken: there is room again"


def test_without_room_the_groups_stay_with_the_rank(
    run: RunDirectory, tmp_path: Path, make_group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = open_one(run, tmp_path)

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refuse)
        assert member.put([make_group(0)]) is None
    real = os.statvfs(tmp_path)
    shared = os.statvfs_result((*tuple(real)[:2], 1000, 520, 520, *tuple(real)[5:], 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: shared)
        assert member.put([make_group(0)]) is not None
        scarce = os.statvfs_result((*tuple(real)[:2], 1000, 500, 500, *tuple(real)[5:], 0))
        patch.setattr(os, "statvfs", lambda path: scarce)
        assert member.put([make_group(0)]) is None, "half of the place stays free"
    assert not list(tmp_path.rglob("*.part"))


def test_a_file_that_is_not_there_says_what_hosts_must_share(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must share this folder.*cluster\.ranks_per_writer"):
        open_one(run, tmp_path).take(str(tmp_path / "nowhere" / "00000000"))


OWNER = """
import sys, time
from pathlib import Path
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.hand_over import HandOver
base = Path(sys.argv[1])
kept = HandOver(RunDirectory(base / "run"), 0, None, 5, 1, memory=base)
print("open", flush=True)
time.sleep(60)
"""


def test_what_a_dead_process_has_left_goes_and_what_lives_stays(run: RunDirectory, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            owner.stdout.readline()
            (folder,) = tmp_path.glob("pekoe-groups-*")
            assert "-local-" in folder.name
            (folder / "00000000").write_bytes(b"left behind")
            first = open_one(run, tmp_path, attempt=1)
            assert folder.exists(), "its owner lives"
        finally:
            owner.kill()
    first.close()
    open_one(run, tmp_path, attempt=2).close()
    assert not list(tmp_path.glob("pekoe-groups-*"))


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason=f"{MEMORY} cannot be written here")
def test_the_shared_memory_of_the_node_is_used(run: RunDirectory, make_group: Make) -> None:
    member = HandOver(run, 0, f"test-{os.getpid()}", 3, 1)
    try:
        (folder,) = MEMORY.glob(f"pekoe-groups-{os.getuid()}-test-{os.getpid()}-*")
        assert folder.is_dir()
    finally:
        member.close()
