"""Who stands still is named, with the stacks of its threads: asked for, found by a watch, or got out by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from worlds import Ended, StartedWorld

from pekoe.pipeline.messages import STACKS_LIMIT, ThreadPhase
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.observe.stack_request import request_path, request_stacks
from pekoe.pipeline.run_directory import RunDirectory


def start(tmp_path: Path, what: str, num_ranks: int = 2) -> StartedWorld:
    run = tmp_path / "run"
    run.mkdir()
    return StartedWorld(run, what, num_ranks)


def only_record(ended: Ended) -> dict[str, Any]:
    assert ended.code == 1, ended.output
    assert len(ended.records) == 1
    return ended.records[0]


def test_stacks_come_from_ranks_that_answer_and_from_one_whose_main_thread_does_not(tmp_path: Path) -> None:
    ended = start(tmp_path, "stacks", 3).finish()
    assert ended.code == 0, ended.output
    said = next(said for said in ended.said if "stacks" in said)
    stacks = said["stacks"]
    assert sorted(stacks) == ["0", "1", "2"]
    assert said["seconds"] < 15.0, "the rank that does not answer would for half a minute"
    for rank in ("0", "1"):
        text = stacks[rank]
        assert text.startswith(f"rank {rank} (")
        assert 'Thread "worker" (waiting for tea), newest call last:' in text
        assert "in stand_still" in text
        assert "threading.Event().wait(60)" in text, "with source lines"
        assert 'Thread "MainThread"' in text
        assert text.index('"worker"') < text.index('"MainThread"'), "threads of the roles come first"
    stuck = stacks["2"]
    assert "no answer within 2 s; last heartbeat" in stuck
    assert "worker: waiting for tea" in stuck
    assert "asked by a signal" in stuck
    assert "in hold_the_lock" in stuck
    assert "in stand_still" in stuck
    assert all(len(text) <= STACKS_LIMIT for text in stacks.values())


def test_a_thread_that_stands_still_is_named_with_its_stacks(tmp_path: Path) -> None:
    ended = start(tmp_path, "stall").finish()
    record = only_record(ended)
    assert record["rank"] == 1
    assert "StalledRoleError: engine on rank 1 (rollout" in record["error"]
    assert "has work but has made no progress for" in record["error"]
    assert "in phase 'decoding'" in record["error"]
    assert "(cluster.progress_seconds is " in record["error"], "the doctor tells which limit to raise"
    assert "idler" not in record["error"]
    assert list(record["stacks"]) == ["1"]
    assert 'Thread "engine" (decoding)' in record["stacks"]["1"]
    assert "in stand_still" in record["stacks"]["1"]


def test_a_rank_stuck_in_c_code_is_named_with_its_stacks(tmp_path: Path) -> None:
    ended = start(tmp_path, "hold").finish()
    record = only_record(ended)
    assert "SilentRankError: rank 1 " in record["error"]
    assert "see logs/0/rank-1.log" in record["error"]
    assert "in hold_the_lock" in record["stacks"]["1"]
    log = (tmp_path / "run" / "logs" / "0" / "rank-1.log").read_text()
    before_the_end, _, _ = log.partition("asked by")
    assert "Timeout (0:00:01.500000)!" in before_the_end, "the rank's own clock has written them too"


def test_a_stopped_rank_is_said_to_be_stopped(tmp_path: Path) -> None:
    world = start(tmp_path, "hold-not", 2)
    pids = {said["rank"]: said["pid"] for said in world.wait_until_said(2)}
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGSTOP)
    record = only_record(world.finish())
    assert "rank 1 " in record["error"]
    assert "is in state T (stopped)" in record["stacks"]["1"]


def test_heartbeats_tell_what_each_thread_does_and_since_when(tmp_path: Path) -> None:
    world = start(tmp_path, "phases", 2)
    world.wait_until_said(2)
    deadline = time.monotonic() + 60
    threads: dict[str, ThreadPhase] = {}
    while (
        not {"slow", "watched"} <= threads.keys() or threads["slow"].seconds < 1.5 or threads["watched"].seconds < 0.5
    ):
        assert time.monotonic() < deadline, "another thread's changes do not reset its age"
        time.sleep(0.1)
        beats = {item.heartbeat.rank: item.heartbeat for item in read_heartbeats(RunDirectory(tmp_path / "run"))}
        threads = {thread.who: thread for thread in beats[0].threads} if 0 in beats else {}
    world.process.send_signal(signal.SIGTERM)
    world.finish()
    assert threads["slow"].phase == "waiting for rank 1"
    assert (threads["slow"].limit, threads["slow"].on) == (30.0, (1,))
    assert threads["quick"].seconds < threads["slow"].seconds - 1.0
    assert threads["watched"].limit == 60.0
    assert threads["watched"].phase == "working, last progress"
    assert beats[0].phase.startswith("slow: waiting for rank 1; quick: step ")
    assert beats[0].phase_seconds < threads["slow"].seconds - 1.0
    assert beats[0].gauges["slow/waiting_share"] == pytest.approx(1.0, abs=0.01)
    assert beats[0].gauges["quick/waiting_share"] == 0.0


@pytest.mark.parametrize("stopped", [None, 1, 0])
def test_status_asks_a_living_world_for_its_stacks(tmp_path: Path, stopped: int | None) -> None:
    """Rank 0 leads the node: when it is stopped, nobody reads the request, and the command asks the processes."""
    world = start(tmp_path, "asked", 3)
    pids = {said["rank"]: said["pid"] for said in world.wait_until_said(3)}
    time.sleep(1.0)
    if stopped is not None:
        os.kill(pids[stopped], signal.SIGSTOP)
    began = time.monotonic()
    shown = subprocess.run(
        [sys.executable, "-m", "pekoe.launch.cli", "status", str(world.run), "--stacks"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    seconds = time.monotonic() - began
    world.process.kill()
    world.process.wait()
    assert shown.returncode == 0, shown.stderr
    assert "rank 1 worker waits since " in shown.stdout
    assert " of 1800 s for tea, on rank 2" in shown.stdout
    assert seconds < 35
    parts = shown.stdout.split("\nrank ")[1:]
    stacks = {int(part[0]): part for part in parts if "Thread" in part or "no answer" in part}
    assert sorted(stacks) == [0, 1, 2], shown.stdout
    for rank, text in stacks.items():
        if rank == stopped:
            assert "is in state T (stopped)" in text
            assert "last heartbeat" in text
            assert "phase 'worker: waiting for tea'" in text
        else:
            assert "in stand_still" in text
    files = world.run / "logs" / "0"
    assert str(files / "stacks-rank-*.txt") in shown.stdout
    assert len(list(files.glob("stacks-rank-?.txt"))) == (0 if stopped == 0 else 3)
    for pid in pids.values():
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def test_a_run_that_has_ended_or_never_began_is_not_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rank of this run has sent a heartbeat"):
        request_stacks(tmp_path)
    world = start(tmp_path, "clean")
    assert world.finish().code == 0
    assert request_stacks(world.run) == "no rank is alive: all have ended in order"
    assert not request_path(RunDirectory(world.run)).exists()
