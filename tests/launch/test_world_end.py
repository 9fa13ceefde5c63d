"""However a rank ends, the world ends soon, with the right exit code and exactly one record, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from worlds import PROGRAM, Ended, StartedWorld

LIMIT = 40.0


def run_world(tmp_path: Path, what: str, num_ranks: int = 2) -> Ended:
    run = tmp_path / "run"
    run.mkdir()
    return StartedWorld(run, what, num_ranks).finish()


def processes_named(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if str(run) in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("what", "error", "thread"),
    [
        ("main", "ValueError: boom in rank 1", "MainThread"),
        ("main-while-barrier", "ValueError: boom in rank 1", "MainThread"),
        ("thread", "ValueError: boom in rank 1", "engine"),
        ("foreign-thread", "ValueError: boom in rank 1", "stranger"),
        ("stuck-main", "ValueError: boom in rank 1", "engine"),
        ("check", "ValueError: boom in rank 1", "MainThread"),
        ("sys-exit", "SystemExit: 3", "MainThread"),
        ("thread-sys-exit", "SystemExit: 3", "engine"),
        ("os-exit", "exited with code 3", ""),
        ("os-exit-0", "exited with code 0", ""),
        ("import-error", "No module named", "MainThread"),
    ],
)
def test_failure_ends_the_world_with_one_record(tmp_path: Path, what: str, error: str, thread: str) -> None:
    ended = run_world(tmp_path, what)
    assert ended.code == 1, ended.output
    assert ended.seconds < LIMIT
    assert len(ended.records) == 1
    record = ended.records[0]
    assert (record["rank"], record["role"], record["thread"]) == (1, "rollout", thread)
    assert error in record["error"]
    assert record["host"]
    assert record["phase"] == ("start" if what == "import-error" else "working")
    assert ("boom" in record["traceback"]) == ("boom" in error)
    assert not processes_named(tmp_path / "run")


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_is_named(tmp_path: Path, victim: int) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "sleep", 3)
    pids = {said["rank"]: said["pid"] for said in world.wait_until_said(3)}
    time.sleep(0.5)
    killed_at = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    ended = world.finish()
    assert time.monotonic() - killed_at < LIMIT
    assert ended.code == 1
    assert len(ended.records) == 1, ended.records
    record = ended.records[0]
    assert record["error"] == "killed by signal 9 (SIGKILL)"
    assert (record["rank"], record["phase"]) == (victim, "working")
    assert record["role"] == ("trainer" if victim == 0 else "rollout")
    assert not processes_named(run)


def test_killed_supervisor_ends_the_world_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "sleep")
    pids = {said["rank"]: said["pid"] for said in world.wait_until_said(2)}
    os.kill(psutil.Process(pids[1]).ppid(), signal.SIGKILL)
    ended = world.finish()
    assert ended.code == 1
    assert len(ended.records) == 1
    assert not processes_named(run)


def test_record_names_the_killed_rank_although_a_survivor_fails_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "killed-survivor-fails")
    pids = {said["rank"]: said["pid"] for said in world.wait_until_said(2)}
    (run / "victim.part").write_text(str(pids[1]))
    (run / "victim.part").rename(run / "victim")
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    ended = world.finish()
    assert len(ended.records) == 1
    assert ended.records[0]["rank"] == 1, ended.output
    assert "signal 9" in ended.records[0]["error"]


def test_children_of_a_killed_rank_die(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "child")
    children = [said["child"] for said in world.wait_until_said(4) if "child" in said]
    pids = {said["rank"]: said["pid"] for said in world.said() if "pid" in said}
    assert len(children) == 2
    os.kill(pids[0], signal.SIGKILL)
    ended = world.finish()
    assert ended.code == 1
    alive = [pid for pid in children if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert not alive


@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_is_noticed_by_its_silence(tmp_path: Path, victim: int) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "serve")
    pids = {said["rank"]: said["pid"] for said in world.wait_until_said(2)}
    time.sleep(0.5)
    os.kill(pids[victim], signal.SIGSTOP)
    ended = world.finish()
    assert ended.code == 1
    assert len(ended.records) == 1
    assert f"rank {victim} " in ended.records[0]["error"]
    assert "no heartbeat" in ended.records[0]["error"]
    assert not processes_named(run)


def test_clean_end_waits_for_the_slower_rank(tmp_path: Path) -> None:
    ended = run_world(tmp_path, "clean", 3)
    assert ended.code == 0, ended.output
    assert not ended.records
    assert {said["rank"] for said in ended.said} == {0, 1, 2}
    assert all(said["shared"] == {"list": [1, 2], "from": 0} and said["hosts"] == 1 for said in ended.said)
    expected = [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}, {"rank": 2, "text": "éé"}]
    assert all(said["collected"] == expected for said in ended.said)
    assert not ended.output.replace("{", "\n{").count("BAD TERMINATION")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("collect-late", "TimeoutError: rank 0: the values of all ranks did not come within 5"),
        ("collect-large", "allowed: at most 1048576"),
    ],
)
def test_collecting_is_bounded(tmp_path: Path, what: str, error: str) -> None:
    ended = run_world(tmp_path, what)
    assert ended.code == 1
    assert error in ended.records[0]["error"]
    assert len(ended.records) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP])
def test_signal_to_the_launcher_stops_every_rank_once(tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "stop-all")
    world.wait_until_said(2)
    world.process.send_signal(number)
    time.sleep(0.05)
    world.process.send_signal(number)
    ended = world.finish()
    assert ended.code == 75, ended.output
    assert not ended.records
    assert sorted(said["rank"] for said in ended.said if "stopped" in said) == [0, 1]
    assert ended.output.count(f"signal {int(number)}: stopping") == 2


def test_signal_to_one_rank_reaches_the_head(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "stop-head")
    pids = {said["rank"]: said["pid"] for said in world.wait_until_said(2)}
    os.kill(pids[1], signal.SIGUSR2)
    ended = world.finish()
    assert ended.code == 75, ended.output
    assert {said["rank"] for said in ended.said if "stopped" in said} >= {0}


def test_deadman_ends_a_rank_that_does_not_stop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "serve")
    world.wait_until_said(2)
    told_at = time.monotonic()
    world.process.send_signal(signal.SIGTERM)
    ended = world.finish()
    assert ended.code == 75, ended.output
    assert 3.0 <= time.monotonic() - told_at < LIMIT
    assert not ended.records
    assert "ending now" in ended.output


def test_world_of_another_size_names_both_numbers(tmp_path: Path) -> None:
    ended = run_world(tmp_path, "wrong-allocation")
    assert ended.code == 78, ended.output
    assert "needs 5 ranks but mpich started 2" in ended.output


def test_worlds_of_size_one_under_a_launcher_of_two_are_refused(tmp_path: Path) -> None:
    """As `srun --mpi=none`: the environment says two tasks, MPI finds itself alone."""
    environ = {**os.environ, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"}
    run = tmp_path / "run"
    command = [sys.executable, str(PROGRAM), str(run), "clean"]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90)
    assert result.returncode == 78, result.stderr
    assert "world of 1 ranks but srun started 2" in result.stderr


def test_idle_ranks_burn_no_core(tmp_path: Path) -> None:
    ended = run_world(tmp_path, "idle", 2)
    assert ended.code == 0, ended.output
    used = {said["rank"]: said["cpu"] for said in ended.said if "cpu" in said}
    assert len(used) == 2
    assert all(seconds < 0.7 for seconds in used.values()), used
