"""Ranges of ports: distinct between processes that ask at once, held, given back, and tried again a bounded number of
times."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from pekoe.launch import port_blocks
from pekoe.launch.port_blocks import PortBlock, reserve

PROCESSES, ROUNDS, SECONDS = 8, 100, 60.0


def plan_in_rounds(barrier: Barrier, taken: multiprocessing.Queue[list[tuple[int, int]]]) -> None:
    at_least = int(os.environ["VLLM_PORT"])
    mine = []
    for _ in range(ROUNDS):
        barrier.wait(SECONDS)
        with reserve(at_least) as block:
            mine.append((block.first, block.last))
            barrier.wait(SECONDS)
    taken.put(mine)


def test_processes_that_ask_at_once_get_distinct_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PORT", "20000")
    context = multiprocessing.get_context("fork")
    barrier, taken = context.Barrier(PROCESSES), context.Queue()
    processes = [context.Process(target=plan_in_rounds, args=(barrier, taken)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    plans = [taken.get(timeout=SECONDS) for _ in processes]
    for process in processes:
        process.join(SECONDS)
        assert process.exitcode == 0
    for round_number in range(ROUNDS):
        ports = [port for plan in plans for port in range(plan[round_number][0], plan[round_number][1] + 1)]
        assert len(ports) == len(set(ports)) == PROCESSES * (port_blocks.BLOCK_PORTS - 1)
        assert min(ports) > 20000


def test_a_range_is_held_and_free_again_when_its_process_dies() -> None:
    code = "from pekoe.launch.port_blocks import reserve\nblock = reserve(); print(block.first, flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    first = int(holder.stdout.readline())
    others = [reserve() for _ in range(20)]
    assert first not in {block.first for block in others}
    assert port_blocks._bound(first - 1) is None
    holder.kill()
    holder.communicate(timeout=60)
    guard = port_blocks._bound(first - 1)
    assert guard is not None
    guard.close()
    for block in others:
        block.release()


def test_a_range_with_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserve() as block:
        first = block.first - 1
    monkeypatch.setattr(port_blocks, "_firsts", lambda at_least: iter([first]))
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", first + 5))
        with pytest.raises(port_blocks.NoPortsError, match="no 32 free ports"):
            reserve()
    reserve().release()


def test_ranges_lie_outside_of_the_kernels_own_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, legal in (
        ("32768\t60999\n", lambda port: port <= 32768 or port > 60999),
        ("1024 65535", lambda port: port > 10240),
    ):
        path = tmp_path / "range"
        path.write_text(text)
        monkeypatch.setattr(port_blocks, "EPHEMERAL", path)
        blocks = [reserve() for _ in range(10)]
        assert all(legal(port) for block in blocks for port in block.ports)
        for block in blocks:
            block.release()


def test_threads_of_a_process_get_distinct_ranges() -> None:
    blocks: list[PortBlock] = []
    threads = [threading.Thread(target=lambda: blocks.append(reserve())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len({block.first for block in blocks}) == 8
    for block in blocks:
        block.release()
