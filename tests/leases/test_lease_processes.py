"""Real processes: several that want the same offers, and kill -9 of worlds and heads at any instant."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pekoe.pipeline.leases import lease_files
from pekoe.pipeline.leases.lease_board import LeaseBoard
from pekoe.pipeline.leases.lease_records import held_folder, offered_folder
from pekoe.pipeline.messages import Assign
from pekoe.pipeline.run_directory import RunDirectory

SCRIPT = Path(__file__).with_name("lease_processes.py")
NUM_OFFERS = 2000
NUM_GROUPS = 500
KILL_SECONDS = 4.0
LIMIT_SECONDS = 60.0


class Processes:
    """Ends whatever is left."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, str(SCRIPT), *map(str, words)])
        self.all.append(process)
        return process

    def close(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


def test_no_offer_is_claimed_twice(memory_path: Path, processes: Processes) -> None:
    run, go = RunDirectory(memory_path / "run"), memory_path / "go"
    board = LeaseBoard(run, 0, "hash", poll_seconds=60.0, lease_seconds=600.0)
    board.open()
    for group in range(NUM_OFFERS):
        board.offer(Assign(group, 0, group, 1, 0))
    board.poll()
    assert len(lease_files.leases_in(offered_folder(run))) == NUM_OFFERS
    names = ["a", "b", "c"]
    racers = [processes.start("racer", run.path, name, go) for name in names]
    end = time.monotonic() + LIMIT_SECONDS
    while len(lines_of(run.path / "at-the-start")) < len(names):
        assert time.monotonic() < end
        time.sleep(0.01)
    go.touch()
    for racer in racers:
        assert racer.wait(LIMIT_SECONDS) == 0
    lines = [line.split() for line in lines_of(run.path / "claimed")]
    assert sorted(int(group) for _, group in lines) == list(range(NUM_OFFERS))
    shares = Counter(name for name, _ in lines)
    assert len(shares) == len(names), f"no race took place: {shares}"
    for name in names:
        groups = {int(group) for who, group in lines if who == name}
        assert {lease.group for lease in lease_files.leases_in(held_folder(run, name))} == groups


def test_kills_of_worlds_and_heads_lose_nothing(memory_path: Path, processes: Processes) -> None:
    """Worlds come back under new names, a head as the next attempt; one world is only stopped for a while."""
    run = RunDirectory(memory_path / "run")
    run.path.mkdir()
    rng = random.Random(5)
    attempt = 0
    head = processes.start("head", run.path, attempt, NUM_GROUPS)
    worlds = {name: processes.start("world", run.path, name) for name in ("w0", "w1", "w2")}
    stopped: subprocess.Popen[bytes] | None = None
    began, number = time.monotonic(), 3
    while (time.monotonic() - began < KILL_SECONDS or attempt == 0 or number <= 4) and head.poll() is None:
        time.sleep(rng.uniform(0.1, 0.5))
        if rng.random() < 0.2:
            head.kill()
            head.wait()
            attempt += 1
            head = processes.start("head", run.path, attempt, NUM_GROUPS)
            continue
        name = rng.choice(sorted(worlds))
        if rng.random() < 0.3 and stopped is None:
            stopped = worlds[name]
            os.kill(stopped.pid, signal.SIGSTOP)
            continue
        if worlds[name] is stopped:
            os.kill(stopped.pid, signal.SIGCONT)
            stopped = None
            continue
        worlds.pop(name).kill()
        worlds[f"w{number}"] = processes.start("world", run.path, f"w{number}")
        number += 1
    if stopped is not None:
        os.kill(stopped.pid, signal.SIGCONT)
    assert head.wait(LIMIT_SECONDS) == 0
    for process in worlds.values():
        assert process.wait(LIMIT_SECONDS) == 0
    assert attempt > 0
    assert number > 4, "nobody was killed"
    heard = [line.split() for line in (run.path / "heard").read_text().splitlines()]
    told = {line.split()[0] for line in (run.path / "told").read_text().splitlines()}
    assert {int(group) for _, *groups in heard for group in groups} == set(range(NUM_GROUPS))
    paths = Counter(path for path, *_ in heard)
    assert set(paths.values()) == {1}, "a notice was delivered twice"
    assert paths.keys() <= told
    assert {name.partition("/")[0] for name in paths} == {"shards"}
