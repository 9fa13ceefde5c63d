"""A world in an allocation as its driver sees it: signals, limits, the verdict. A script stands in srun's place here;
tests/slurm has the real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pekoe.launch.error_record import ErrorRecord, write_record
from pekoe.launch.heartbeat_files import write_heartbeat
from pekoe.launch.stop_request import stop_path
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.run_directory import RunDirectory

DRIVER = """
import sys
from pathlib import Path
from pekoe.launch import step_world
from pekoe.launch.step_world import Limits, StepStart, StepWorld
step_world.LEAVE_SECONDS = 1.0
from pekoe.pipeline.run_directory import RunDirectory
run, launcher, start, failed, stop, *command = sys.argv[1:]
limits = Limits(float(start), float(failed), float(stop))
world = StepWorld(StepStart(RunDirectory(Path(run)), 0, tuple(command), launcher, "0", limits))
sys.exit(world.wait())
"""
SRUN = """
import json, os, signal, sys, time
from pathlib import Path
run, how = Path(sys.argv[1]), sys.argv[2]
heard = []
def hear(number, frame):
    heard.append(number)
    (run / "heard").write_text(json.dumps(heard))
for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, hear)
(run / "up").write_text("")
def note(code):
    (run / "logs" / "0").mkdir(parents=True, exist_ok=True)
    (run / "logs" / "0" / "end.json").write_text(json.dumps({"code": code}))
if how.startswith("exit"):
    _, code, noted = how.split(",")
    if noted:
        note(int(noted))
    sys.exit(int(code))
if how.startswith("hang"):
    note(int(how.split(",")[1]))
while not heard:
    time.sleep(0.02)
if how == "stop":
    time.sleep(0.7)
    note(75)
    sys.exit(0)
sys.exit(1 if heard[0] == signal.SIGTERM else 3)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path)
    made.create()
    made.run_json.write_text(json.dumps({"id": "x", "attempts": [{"number": 0}]}))
    return made


def start(
    run: RunDirectory, how: str, launcher: str = "srun", limits: tuple[float, float, float] = (20.0, 20.0, 20.0)
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SRUN, str(run.path), how]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(run.path), launcher, *map(str, limits), *command], env=environ,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(driver: subprocess.Popen[str], seconds: float = 15.0) -> tuple[int, str]:
    try:
        output, _ = driver.communicate(timeout=seconds)
    finally:
        driver.kill()
    return driver.returncode, output


def wait_until_up(run: RunDirectory) -> None:
    end = time.monotonic() + 10
    while not (run.path / "up").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def hear(run: RunDirectory, rank: int = 0, host: str = "n1", ago: float = 0.0, phase: str = "serving") -> None:
    write_heartbeat(run, 0, Heartbeat(rank, "trainer", host, 1, 0, phase, 0.0, -1))
    path = run.heartbeats / f"rank-{rank}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "time": time.time() - ago}))


def record_of(run: RunDirectory) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.errors / "attempt-0.json").read_text())
    return found


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_every_stop_signal_reaches_srun_as_usr2_and_once(run: RunDirectory, number: signal.Signals) -> None:
    hear(run)
    driver = start(run, "stop")
    wait_until_up(run)
    driver.send_signal(number)
    time.sleep(0.2)
    driver.send_signal(signal.SIGUSR2)
    code, output = finish(driver)
    assert code == 75, output
    assert json.loads((run.path / "heard").read_text()) == [signal.SIGUSR2]
    told = signal.SIGUSR2 if number == signal.SIGINT else number
    assert json.loads(stop_path(run, 0).read_text())["signal"] == told
    assert output.count("stopping:") == 1


def test_before_a_rank_is_heard_only_the_file_tells(run: RunDirectory) -> None:
    """srun would die of the signal while it still waits for its step."""
    driver = start(run, "wait", limits=(20.0, 20.0, 1.0))
    wait_until_up(run)
    driver.send_signal(signal.SIGUSR2)
    code, output = finish(driver)
    assert stop_path(run, 0).exists()
    assert json.loads((run.path / "heard").read_text()) == [signal.SIGTERM], "after the limit, to end it"
    assert code == 75, output
    assert "has not ended 1 s after the stop signal" in output


def test_mpiexec_gets_no_signal_that_its_ranks_would_not_survive(run: RunDirectory) -> None:
    hear(run)
    driver = start(run, "wait", "mpiexec", (20.0, 20.0, 1.0))
    wait_until_up(run)
    driver.send_signal(signal.SIGUSR2)
    code, _ = finish(driver)
    assert json.loads((run.path / "heard").read_text()) == [signal.SIGTERM]
    assert code == 75
    assert stop_path(run, 0).exists()


def test_a_second_interrupt_kills(run: RunDirectory) -> None:
    hear(run)
    driver = start(run, "wait", "mpiexec")
    wait_until_up(run)
    driver.send_signal(signal.SIGINT)
    time.sleep(0.5)
    driver.send_signal(signal.SIGINT)
    code, _ = finish(driver)
    assert code == 1
    assert "second Ctrl-C" in record_of(run)["error"]


def test_a_world_that_does_not_end_after_its_error_record_is_ended(run: RunDirectory) -> None:
    hear(run)
    write_record(run, ErrorRecord(0, 1, "n2", "rollout", "serving", 1.0, "RuntimeError: boom"))
    began = time.monotonic()
    code, output = finish(start(run, "wait", limits=(20.0, 1.0, 20.0)))
    assert code == 1
    assert time.monotonic() - began < 10
    assert "rank 1 (rollout, n2) failed in phase 'serving': RuntimeError: boom" in output


def test_a_world_of_which_nothing_is_heard_is_ended(run: RunDirectory) -> None:
    code, _ = finish(start(run, "wait", limits=(0.5, 20.0, 20.0)))
    assert code == 1
    assert "no rank was heard within 0 s" in record_of(run)["error"]


@pytest.mark.parametrize(
    ("how", "code"),
    [("exit,0,0", 0), ("exit,0,75", 75), ("exit,0,78", 78), ("exit,78,", 78), ("exit,137,78", 78)],
)
def test_the_code_is_what_the_head_noted_and_srun_confirms(run: RunDirectory, how: str, code: int) -> None:
    hear(run)
    assert finish(start(run, how))[0] == code
    assert not (run.errors / "attempt-0.json").exists()


@pytest.mark.parametrize("how", ["exit,137,", "exit,137,0", "exit,1,75", "exit,0,"])
def test_without_a_word_of_any_rank_the_one_that_was_silent_first_is_blamed(run: RunDirectory, how: str) -> None:
    hear(run, 0)
    hear(run, 1, "n2", ago=9.0)
    code, output = finish(start(run, how), 20.0)
    assert code == 1
    record = record_of(run)
    assert (record["rank"], record["host"]) == (1, "n2")
    assert how.split(",")[1] in record["error"] or "left no end.json" in record["error"]
    assert "rank 1 (trainer, n2)" in output


def test_a_record_that_blames_the_configuration_gives_its_code(run: RunDirectory) -> None:
    host = socket.gethostname()
    write_record(run, ErrorRecord(0, 0, host, "trainer", "mpi init", 1.0, "WorldSizeError: 2 and 4", code=78))
    assert finish(start(run, "exit,137,"))[0] == 78


@pytest.mark.parametrize(("last_phase", "expected"), [("ended", 0), ("serving", 1)])
def test_a_launcher_that_outlives_its_world_is_ended(run: RunDirectory, last_phase: str, expected: int) -> None:
    """As srun does when the slurmstepd of a node was killed. It is a good end if all ranks say so."""
    hear(run, 0, phase="ended")
    hear(run, 1, phase=last_phase)
    code, output = finish(start(run, "hang,0"))
    assert code == expected, output
    assert "srun has not ended 1 s after the head" in output
    assert (run.errors / "attempt-0.json").exists() == bool(expected)
