"""The thread that writes heartbeats: the newest of each rank, whatever the filesystem does meanwhile."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from pekoe.launch import heartbeat_files
from pekoe.launch.heartbeat_files import HeartbeatFiles, seconds_between_writes
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.observe.heartbeat_files import damaged_files, last_heartbeat, read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory


def beat(rank: int, counter: int) -> Heartbeat:
    return Heartbeat(rank, "rollout", "here", 1, counter, "rollout", 0.0, 0)


def test_while_the_filesystem_hangs_only_the_newest_of_each_rank_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    hangs, goes_on = threading.Event(), threading.Event()
    write, written = heartbeat_files.write_node, []

    def slow(run: RunDirectory, attempt: int, host: str, beats: Mapping[int, tuple[Heartbeat, float]]) -> None:
        hangs.set()
        assert goes_on.wait(60)
        written.append([(rank, heartbeat.counter) for rank, (heartbeat, _) in sorted(beats.items())])
        write(run, attempt, host, beats)

    monkeypatch.setattr(heartbeat_files, "write_node", slow)
    files = HeartbeatFiles(run, 0, "here", 0.0)
    files.put(beat(0, 1))
    assert hangs.wait(60)
    for counter in range(2, 1000):
        files.put(beat(0, counter))
        files.put(beat(1, counter))
    goes_on.set()
    files.close(seconds=10)
    assert written == [[(0, 1)], [(0, 999), (1, 999)]]
    assert {item.heartbeat.rank: item.heartbeat.counter for item in read_heartbeats(run)} == {0: 999, 1: 999}


def test_a_node_has_one_file_which_takes_the_place_of_those_of_its_starting_ranks(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    for rank in range(4):
        heartbeat_files.write_heartbeat(run, 0, beat(rank, 0))
    files = HeartbeatFiles(run, 0, "node/1", 0.0)
    for rank in range(3):
        files.put(beat(rank, 5))
    files.close(seconds=10)
    assert sorted(path.name for path in run.heartbeats.iterdir()) == ["node-node%2F1.json", "rank-3.json"]
    assert {item.heartbeat.rank: item.heartbeat.counter for item in read_heartbeats(run)} == {0: 5, 1: 5, 2: 5, 3: 0}
    assert last_heartbeat(run, 0, 3) == beat(3, 0)
    assert last_heartbeat(run, 1, 3) is None
    assert damaged_files(run) == []
    (run.heartbeats / "node-x.json").write_text('{"attempt": 0, "ranks": [{"ran')
    assert [path.name for path in damaged_files(run)] == ["node-x.json"]
    assert len(read_heartbeats(run)) == 4


def test_writes_are_apart_and_the_last_word_is_not_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    write, times = heartbeat_files.write_node, []

    def timed(run: RunDirectory, attempt: int, host: str, beats: Mapping[int, tuple[Heartbeat, float]]) -> None:
        times.append(time.monotonic())
        write(run, attempt, host, beats)

    monkeypatch.setattr(heartbeat_files, "write_node", timed)
    files = HeartbeatFiles(run, 0, "here", 0.3)
    end = time.monotonic() + 1.0
    counter = 0
    while time.monotonic() < end:
        counter += 1
        files.put(beat(0, counter))
        time.sleep(0.01)
    files.put(beat(0, counter + 1))
    files.close(seconds=10)
    assert len(times) <= 5
    assert read_heartbeats(run)[0].heartbeat.counter == counter + 1


def test_on_a_full_disk_the_old_file_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    heartbeat_files.write_node(run, 0, "here", {0: (beat(0, 1), 1.0)})

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    heartbeat_files.write_node(run, 0, "here", {0: (beat(0, 2), 2.0), 1: (beat(1, 2), 2.0)})
    assert [item.heartbeat.counter for item in read_heartbeats(run)] == [2, 2]
    with pytest.raises(OSError, match="planted"):
        heartbeat_files.write_node(run, 0, "here", {rank: (beat(rank, 3), 3.0) for rank in range(64)})
    assert [item.heartbeat.counter for item in read_heartbeats(run)] == [2, 2], "what does not fit is left out whole"


def test_very_many_nodes_write_less_often() -> None:
    assert seconds_between_writes(2.0, 4) == 2.0
    assert seconds_between_writes(2.0, 1000) == 5.0
    assert seconds_between_writes(10.0, 5000) == 10.0
