"""The local launcher's own duties: arguments, environment, worlds that never start, Ctrl-C, rank logs."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pekoe.launch.local import LocalWorld, find_mpiexec, mpiexec_arguments, rank_environment
from pekoe.pipeline.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))
from worlds import LAUNCH, PROGRAM, StartedWorld


def test_arguments() -> None:
    arguments = mpiexec_arguments(Path("/m/mpiexec"), 3, ("-m", "pekoe.launch.rank", "/run", "0"), "/python")
    assert arguments == ["/m/mpiexec", "-n", "3", "/python", "-u", "-m", "pekoe.launch.rank", "/run", "0"]
    assert os.access(find_mpiexec(), os.X_OK)


def test_environment_has_the_snapshot_first_and_nothing_of_an_outer_launcher(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    world = LocalWorld(run, 0, 2, (), {"EXTRA": "1"})
    outer = {"PMI_RANK": "0", "PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "0", "MPI_LOCALRANKID": "0", "PYTHONPATH": "/p"}
    variables = rank_environment(outer, world, tmp_path / "notes")
    assert variables["PYTHONPATH"] == "/p"
    run.code.mkdir()
    variables = rank_environment(outer, world, tmp_path / "notes")
    assert variables["PYTHONPATH"] == f"{run.code}:/p"
    assert variables["EXTRA"] == "1"
    assert not {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"} & set(variables)


def test_a_world_that_never_starts_has_a_record(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    ended = StartedWorld(run, "clean", program=tmp_path / "no_such_program.py").finish()
    assert ended.code == 1
    assert len(ended.records) == 1
    assert "before any rank started" in ended.records[0]["error"]


def test_first_interrupt_asks_and_the_second_kills(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "deaf")
    world.wait_until_said(2)
    world.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert world.process.poll() is None
    told_at = time.monotonic()
    world.process.send_signal(signal.SIGINT)
    ended = world.finish()
    assert time.monotonic() - told_at < 5
    assert ended.code == 1
    assert ended.output.count("signal 15: stopping") == 2
    assert "second Ctrl-C" in ended.records[0]["error"]
    line = "pekoe: stopping: the step ends, a checkpoint is written (once more: end at once)\n"
    assert ended.output.count(line) == 1
    assert "pekoe: ended at once by the user (second Ctrl-C), without a checkpoint of the last steps" in ended.output
    assert f"pekoe run --resume {run}" in ended.output
    assert "rank -1" not in ended.output


def test_messages_on_a_terminal_begin_on_fresh_lines_and_the_cursor_comes_back(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-c", LAUNCH, str(tmp_path / "run"), "2", str(PROGRAM), str(tmp_path / "run"), "deaf"]
    launcher = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        shown = read_until(ours, lambda text: text.count('"pid"') == 2)
        launcher.send_signal(signal.SIGINT)
        shown += read_until(ours, lambda text: "pekoe: stopping" in text)
        launcher.send_signal(signal.SIGINT)
        shown += read_until(ours, lambda text: "the record is" in text)
        assert launcher.wait(60) == 1
    finally:
        launcher.kill()
        os.close(ours)
    assert "\n\npekoe: stopping: the step ends" in shown
    assert shown.rindex("\x1b[?25h") < shown.index("\npekoe: ended at once by the user")


def read_until(descriptor: int, enough: Callable[[str], bool], seconds: float = 30.0) -> str:
    """What a terminal shows until it is enough, with plain line ends."""
    text, deadline = "", time.monotonic() + seconds
    while not enough(text):
        assert time.monotonic() < deadline, text
        if select.select([descriptor], [], [], 0.2)[0]:
            text += os.read(descriptor, 65536).decode().replace("\r\n", "\n")
    return text


def test_signal_before_the_ranks_are_there_is_kept_for_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "stop-all")
    deadline = time.monotonic() + 20
    while not handles(world.process.pid, signal.SIGUSR2):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    world.process.send_signal(signal.SIGUSR2)
    ended = world.finish()
    assert ended.code == 75, ended.output
    assert sorted(said["rank"] for said in ended.said if "stopped" in said) == [0, 1]


def handles(pid: int, number: signal.Signals) -> bool:
    """Has the process put a handler of its own in place?"""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (number - 1) & 1)


@pytest.mark.parametrize("is_head", [True, False])
def test_rank_log_takes_prints_logging_and_c_output(tmp_path: Path, is_head: bool) -> None:
    program = (
        "import sys, os, logging\n"
        "from pathlib import Path\n"
        "from pekoe.launch.rank_log import open_log\n"
        f"open_log(Path(sys.argv[1]), 3, is_head={is_head})\n"
        "print('printed')\n"
        "logging.getLogger('x').info('informed')\n"
        "logging.getLogger('x').warning('warned')\n"
        "os.write(2, b'from C\\n')\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), 11)\n"
    )
    log = tmp_path / "logs" / "0" / "rank-3.log"
    result = subprocess.run([sys.executable, "-c", program, str(log)], capture_output=True, text=True, timeout=60)
    text = log.read_text()
    for part in ("printed", "informed", "warned", "from C", "rank 3 INFO", "Segmentation fault"):
        assert part in text
    assert ("printed" in result.stdout) == is_head
    assert ("warned" in result.stdout) == is_head
    assert "informed" not in result.stdout
