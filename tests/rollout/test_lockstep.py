"""The line between the ranks of one engine: the same commands everywhere, equal tokens or an error, and no idle CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import HashStore

from pekoe.pipeline.rollout.engine import GenerationRequest, Instance, SamplingParameters
from pekoe.pipeline.rollout.engines.vllm.commands import Add, Load, LoadAdapter, Remove, Score, Sleep, Stop, Turn, Wake
from pekoe.pipeline.rollout.engines.vllm.lockstep import MESSAGE_BYTES, Lockstep
from pekoe.pipeline.rollout.engines.vllm.turn_codec import decode_turn, encode_turn

PROGRAM = Path(__file__).with_name("lockstep_rank.py")
SECONDS = 60.0


def together(size: int, work: Callable[[Lockstep], object]) -> list[object]:
    """`work` on every rank of an instance, a thread each."""
    store = HashStore()

    def rank_of(rank: int) -> object:
        line = Lockstep(Instance(size, rank, store), lambda error: None, SECONDS)
        try:
            return work(line)
        finally:
            line.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size), timeout=SECONDS))


def test_all_ranks_get_the_leaders_commands_of_any_size() -> None:
    sent = [b"", b"a", bytes(MESSAGE_BYTES - 24), bytes(range(256)) * 8, os.urandom(100_000), b"z"]

    def work(line: Lockstep) -> list[bytes]:
        return [line.share(commands) if line.leads else line.share() for commands in sent]

    assert together(3, work) == [sent] * 3


def test_equal_tokens_are_no_error() -> None:
    def work(line: Lockstep) -> int:
        for turn in range(20):
            line.share(b"step")
            line.digest.add([(turn, 2 * turn, -0.5)])
        return line.turn

    assert together(2, work) == [20, 20]


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 of the same engine did not come within 0\.2 s"):
        Lockstep(Instance(2, 0, HashStore()), lambda error: None, 0.2)


def test_every_command_survives_the_way() -> None:
    sampling = SamplingParameters(
        max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=3, stop_token_ids=(4,), stop=("\n",),
        frequency_penalty=0.5, logit_bias=((3, -1.5),), ignore_eos=True, greedy=False, min_new_tokens=2,
    )  # fmt: skip
    request = GenerationRequest((1, 2, 3), sampling, seed=(1 << 63) + 5, group=3, sample=1, group_size=4, min_version=2)
    turn = Turn(
        (
            Add(3, request, (1, 4), 10), Remove((1, 2)), Load(7), Score(((1, 2), ()), 0.7), Sleep(), Wake(),
            LoadAdapter("a", Path("/x/y"), 2), Stop(),
        ),
        step=True,
    )  # fmt: skip
    assert decode_turn(encode_turn(turn)) == turn
    assert decode_turn(encode_turn(Turn((), step=False))) == Turn((), step=False)


class Ranks:
    """Processes of one instance, each with its line alone."""

    def __init__(self, size: int) -> None:
        leader = self.start(0, size, "0")
        port = self.read(leader)
        self.processes = [leader, *(self.start(rank, size, port) for rank in range(1, size))]
        for process in self.processes:
            assert self.read(process) == "there"

    @staticmethod
    def start(rank: int, size: int, port: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(size), port],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @staticmethod
    def read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        line = process.stdout.readline().strip()
        timer.cancel()
        return line

    def turns(self, count: int, commands: str = "step") -> float:
        """Seconds of one turn, over so many."""
        leader = self.processes[0]
        assert leader.stdin is not None
        leader.stdin.write(f"{commands} {count}\n")
        leader.stdin.flush()
        return float(self.read(leader).split()[1])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()


def test_idle_ranks_use_no_cpu_and_the_end_of_one_ends_all(ranks: Ranks) -> None:
    assert ranks.turns(300) < 0.05
    processes = [psutil.Process(process.pid) for process in ranks.processes]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(2.0)
    used = [sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before, strict=True)]
    assert max(used) < 0.1
    ranks.turns(1)
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    began = time.monotonic()
    for process in ranks.processes[1:]:
        assert process.wait(timeout=90) != 0
        assert Ranks.read(process).startswith("lost rank")
    assert time.monotonic() - began < 25


def test_other_tokens_on_one_rank_are_an_error_that_names_both(ranks: Ranks) -> None:
    ranks.turns(3)
    ranks.turns(1, "differ")
    leader, differing, third = ranks.processes
    assert leader.stdin is not None
    leader.stdin.write("step 1\n")
    leader.stdin.flush()
    assert differing.wait(timeout=90) == 3
    words = Ranks.read(differing)
    assert "rank 1 of 3" in words
    assert "sampled other tokens than rank 0 of 3" in words
    assert "before turn 5" in words
    for process in (leader, third):
        assert process.wait(timeout=90) == 3


def test_the_leader_hears_of_a_lost_follower_while_it_is_idle(pair: Ranks) -> None:
    pair.turns(1)
    os.kill(pair.processes[1].pid, signal.SIGKILL)
    assert pair.processes[0].wait(timeout=90) == 3
    assert "rank 1 of 2" in Ranks.read(pair.processes[0])


def test_an_orderly_end_is_no_loss(pair: Ranks) -> None:
    pair.turns(5)
    leader = pair.processes[0]
    assert leader.stdin is not None
    leader.stdin.close()
    for process in pair.processes:
        assert Ranks.read(process) == "over 6"
        assert process.wait(timeout=90) == 0
