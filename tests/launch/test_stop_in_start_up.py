"""Stop signals before MPI, in MPI_Init and while loading; stops that are the teardown of a world that has failed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from worlds import StartedWorld

LIMIT = 40.0
KINDS = [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP]


def start(tmp_path: Path, what: str, num_ranks: int = 2) -> StartedWorld:
    run = tmp_path / "run"
    run.mkdir()
    return StartedWorld(run, what, num_ranks)


@pytest.mark.parametrize(
    ("where", "number"),
    [("before MPI", signal.SIGHUP), ("loading", signal.SIGUSR2), *(("in MPI_Init", number) for number in KINDS)],
)
def test_a_stop_in_start_up_ends_in_order(tmp_path: Path, where: str, number: signal.Signals) -> None:
    """Rank 0 comes to MPI when it may: until then it is before MPI, and rank 1 is in MPI_Init."""
    world = start(tmp_path, "loading" if where == "loading" else "slow-init")
    world.wait_until_said(2)
    if where == "in MPI_Init":
        time.sleep(1.0)
        assert not any("joined" in said for said in world.said())
    world.process.send_signal(number)
    time.sleep(0.05)
    world.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    (tmp_path / "run" / "go").touch()
    ended = world.finish()
    assert ended.code == 75, ended.output
    assert not ended.records
    assert sorted(said["rank"] for said in ended.said if said.get("saves")) == [0, 1]
    assert ended.output.count(": stopping at the next boundary") == 2, "one stop for each rank"


def test_a_rank_that_never_comes_to_mpi_holds_up_no_stop(tmp_path: Path) -> None:
    world = start(tmp_path, "stuck-init")
    (tmp_path / "run" / "go").touch()
    world.wait_until_said(2)
    time.sleep(2.5)
    told_at = time.monotonic()
    world.process.send_signal(signal.SIGTERM)
    ended = world.finish()
    assert ended.code == 75, ended.output
    assert time.monotonic() - told_at < LIMIT, "long before the limit of MPI_Init"
    assert not ended.records


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stop_that_follows_a_crash_saves_nothing_and_is_a_failure(tmp_path: Path, victim: int) -> None:
    world = start(tmp_path, "crash", 3)
    pids = {said["rank"]: said["pid"] for said in world.wait_until_said(3)}
    supervisors = {rank: psutil.Process(pid).ppid() for rank, pid in pids.items()}
    time.sleep(1.2)
    crashed_at = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    for rank, supervisor in supervisors.items():
        if rank != victim and psutil.pid_exists(supervisor):
            os.kill(supervisor, signal.SIGTERM)
    ended = world.finish()
    assert ended.code == 1, ended.output
    assert time.monotonic() - crashed_at < LIMIT
    assert len(ended.records) == 1
    assert (ended.records[0]["rank"], ended.records[0]["error"]) == (victim, "killed by signal 9 (SIGKILL)")
    assert not any(said.get("saves") for said in ended.said)


@pytest.mark.parametrize("what", ["serve", "crash"])
def test_ranks_that_are_torn_down_after_a_failure_do_not_ask_for_a_requeue(tmp_path: Path, what: str) -> None:
    """As under srun, which ends the others by SIGTERM: the record is there, the deadman ends them with 1, not 75."""
    world = start(tmp_path, what)
    world.wait_until_said(2)
    errors = tmp_path / "run" / "errors"
    errors.mkdir(exist_ok=True)
    record = {
        "attempt": 0, "rank": 7, "host": "h", "role": "rollout", "phase": "p", "phase_seconds": 0.0, "error": "e",
    }  # fmt: skip
    (errors / "attempt-0.json").write_text(json.dumps(record))
    world.process.send_signal(signal.SIGTERM)
    ended = world.finish()
    assert ended.code == 1, ended.output
    assert len(ended.records) == 1
    assert not any(said.get("saves") for said in ended.said)
    if what == "crash":
        assert sorted(said["rank"] for said in ended.said if said.get("saves") is False) == [0, 1]
