"""The thread that writes heartbeats: the newest of each rank, whatever the filesystem does meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pekoe.launch import heartbeat_files
from pekoe.launch.heartbeat_files import HeartbeatFiles
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory


def beat(rank: int, counter: int) -> Heartbeat:
    return Heartbeat(rank, "rollout", "here", 1, counter, "rollout", 0.0, 0)


def test_while_the_filesystem_hangs_only_the_newest_of_each_rank_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    hangs, goes_on = threading.Event(), threading.Event()
    write, written = heartbeat_files.write_heartbeat, []

    def slow(run: RunDirectory, attempt: int, heartbeat: Heartbeat) -> None:
        hangs.set()
        assert goes_on.wait(10)
        written.append((heartbeat.rank, heartbeat.counter))
        write(run, attempt, heartbeat)

    monkeypatch.setattr(heartbeat_files, "write_heartbeat", slow)
    files = HeartbeatFiles(run, 0)
    files.put(beat(0, 1))
    assert hangs.wait(10)
    for counter in range(2, 1000):
        files.put(beat(0, counter))
        files.put(beat(1, counter))
    goes_on.set()
    files.close(seconds=10)
    assert written == [(0, 1), (0, 999), (1, 999)]
    assert {item.heartbeat.rank: item.heartbeat.counter for item in read_heartbeats(run)} == {0: 999, 1: 999}
