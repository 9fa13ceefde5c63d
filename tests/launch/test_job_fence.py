"""Only the newest attempt may write; a new one begins when the old one is silent."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pekoe.launch.fence import Fence, SupersededError, newest_attempt, raise_fence, wait_until_silent
from pekoe.launch.heartbeat_files import write_heartbeat
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.run_directory import RunDirectory

Beat = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path)
    made.create()
    made.run_json.write_text(json.dumps({"id": "x", "attempts": [{"number": 0}]}))
    return made


@pytest.fixture
def beat(run: RunDirectory) -> Beat:
    def write(host: str, pid: int = 1, phase: str = "serving") -> None:
        write_heartbeat(run, 0, Heartbeat(0, "trainer", host, pid, 0, phase, 0.0, -1))

    return write


def test_a_raised_fence_stops_the_attempt_below_it_and_not_the_next(run: RunDirectory) -> None:
    old = Fence(run, 0)
    old.check()
    assert (newest_attempt(run), raise_fence(run), newest_attempt(run)) == (0, 1, 1)
    with pytest.raises(SupersededError, match=r"attempt 1 of .* has begun"):
        old.check()
    Fence(run, 1).check()
    assert raise_fence(run) == 1, "a driver that died before its attempt has begun leaves nothing that blocks"


def test_an_attempt_that_has_begun_is_a_fence_by_itself(run: RunDirectory) -> None:
    run.run_json.write_text(json.dumps({"id": "x", "attempts": [{"number": 0}, {"number": 1}]}))
    with pytest.raises(SupersededError):
        Fence(run, 0).check()


def test_a_rank_that_is_dead_or_ended_is_not_waited_for(run: RunDirectory, beat: Beat) -> None:
    for host, phase, ended in (
        (socket.gethostname(), "serving", ()), ("elsewhere", "ended", ()), ("lost", "serving", ("lost",)),
    ):  # fmt: skip
        beat(host, 2**22 + 1, phase)
        began = time.monotonic()
        wait_until_silent(run, 5.0, ended)
        assert time.monotonic() - began < 1.0


@pytest.fixture
def rank_here() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "pekoe"])
    while b"pekoe" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def test_a_rank_here_is_waited_for_until_its_process_ends(
    run: RunDirectory, beat: Beat, rank_here: subprocess.Popen[bytes]
) -> None:
    beat(socket.gethostname(), rank_here.pid)
    said: list[str] = []
    with pytest.raises(TimeoutError, match=f"attempt 0 still runs.*pid {rank_here.pid}"):
        wait_until_silent(run, 0.2, say=said.append)
    assert len(said) == 1
    threading.Timer(0.5, rank_here.kill).start()
    threading.Timer(0.6, rank_here.wait).start()
    wait_until_silent(run, 10.0)


def test_a_rank_elsewhere_is_waited_for_while_it_is_heard(
    run: RunDirectory, beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pekoe.launch.fence.REMOTE_SILENCE_SECONDS", 1.0)
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.2):
            beat("elsewhere")

    beat("elsewhere")
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        with pytest.raises(TimeoutError, match="rank 0 on elsewhere"):
            wait_until_silent(run, 1.5)
    finally:
        over.set()
        thread.join()
    began = time.monotonic()
    wait_until_silent(run, 10.0)
    assert 0.3 < time.monotonic() - began < 3.0


def test_a_clock_that_is_ahead_keeps_no_dead_rank_alive(
    run: RunDirectory, beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pekoe.launch.fence.REMOTE_SILENCE_SECONDS", 1.0)
    beat("elsewhere")
    path = run.heartbeats / "rank-0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "time": time.time() + 3600}))
    wait_until_silent(run, 5.0)
