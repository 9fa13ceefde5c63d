"""Engines over several ranks: equal to one rank, weights in flight, idle without CPU, and no rank outlives another."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "runs")]

from run_command import base_overrides, run  # noqa: E402
from tiny_model import write_sums, write_tiny_model  # noqa: E402

from pekoe.launch.rendezvous import split_address  # noqa: E402

pytestmark = pytest.mark.vllm

PROGRAM = Path(__file__).with_name("tensor_parallel_rank.py")
START_SECONDS = 120.0
END_SECONDS = 8.0
VOCABULARY = 200
"""More than vLLM's padding of 64, so that both ranks hold rows of the embedding."""
TOLERANCE = 1e-4


class Rank:
    """A process of an instance."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def send(self, do: str, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def read(self, seconds: float = 60.0) -> Any:
        """The next answer; None at the end of the process."""
        assert self.process.stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith("@"):
                    return json.loads(line[1:])
            return None
        finally:
            timer.cancel()

    def ask(self, do: str, **order: Any) -> Any:
        self.send(do, **order)
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class TwoRanks:
    """One engine over two processes."""

    def __init__(self, model: Path) -> None:
        self.leader = Rank(0, 2, model, "")
        self.address = self.leader.read()
        self.follower = Rank(1, 2, model, self.address)
        self.ranks = (self.leader, self.follower)

    def await_build(self) -> None:
        assert [rank.read(START_SECONDS) for rank in self.ranks] == ["there"] * 2

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture(scope="module")
def model(vllm_models: Any) -> Path:
    """Checkpoint, with the weights of versions 1 and 2 beside it."""
    folder: Path = vllm_models.folder("qwen3", vocab_size=VOCABULARY)
    for version in (1, 2):
        torch.save(vllm_models.weights(folder, version), folder / f"v{version}.pt")
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[TwoRanks]:
    made = TwoRanks(model)
    made.await_build()
    yield made
    made.close()


def requests(max_new_tokens: int = 24, count: int = 4) -> list[dict[str, Any]]:
    generator = np.random.default_rng(3)
    return [
        {"tokens": generator.integers(3, VOCABULARY, size).tolist(), "seed": seed, "max_new_tokens": max_new_tokens}
        for seed, size in enumerate((5, 17, 2, 40)[:count])
    ]


def gap(vllm_models: Any, model: Path, prompt: Sequence[int], answer: dict[str, Any]) -> float:
    """Largest distance to transformers, each token with the weights of its version."""
    versions = np.asarray(answer["versions"])
    rows = {
        v: vllm_models.logprobs(model, [*prompt, *answer["tokens"]], seed=v or None) for v in set(answer["versions"])
    }
    expected = [rows[version][len(prompt) + index] for index, version in enumerate(versions)]
    return float(np.abs(np.asarray(answer["logprobs"]) - expected).max())


def test_two_ranks_sample_what_one_does(engine: TwoRanks, engines: Any, make_request: Any, model: Path) -> None:
    asked = requests()
    answers = engine.leader.ask("generate", requests=asked)
    alone = engines.build(engines.settings(model))
    single = engines.generate(
        alone, [make_request(r["tokens"], seed=r["seed"], max_new_tokens=r["max_new_tokens"]) for r in asked]
    )
    engines.close()
    for answer, response in zip(answers, single, strict=True):
        assert answer["tokens"] == response.tokens.tolist()
        np.testing.assert_allclose(answer["logprobs"], response.logprobs, atol=TOLERANCE)


def test_an_idle_follower_uses_no_cpu(engine: TwoRanks) -> None:
    processes = [psutil.Process(rank.process.pid) for rank in engine.ranks]
    time.sleep(0.5)
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(3.0)
    used = [sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before, strict=True)]
    assert max(used) < 0.15


def test_weights_in_flight_reach_every_rank(engine: TwoRanks, vllm_models: Any, model: Path) -> None:
    asked = requests(max_new_tokens=150)
    base = engine.leader.ask("gauges")["tokens"]
    engine.leader.send("begin", requests=asked)
    while engine.leader.ask("gauges")["tokens"] < base + 80:
        time.sleep(0.01)
    rows = [[*request["tokens"], 7, 8, 9] for request in asked]
    scored = engine.leader.ask("load", version=1, sequences=rows)
    for row, found in zip(rows, scored, strict=True):
        np.testing.assert_allclose(found, vllm_models.logprobs(model, row, seed=1), atol=TOLERANCE)
    answers = engine.leader.read()
    for request, answer in zip(asked, answers, strict=True):
        assert set(answer["versions"]) == {0, 1}
        assert gap(vllm_models, model, request["tokens"], answer) < TOLERANCE


def test_a_rank_that_samples_other_tokens_is_named(engine: TwoRanks) -> None:
    """Last: nothing is left of this engine."""
    engine.follower.process.send_signal(signal.SIGUSR1)
    assert engine.follower.read() == "otherwise"
    engine.leader.send("begin", requests=requests())
    assert engine.follower.process.wait(END_SECONDS) == 3
    words = engine.follower.read()
    assert "rank 1 of 2" in words
    assert "sampled other tokens than rank 0 of 2" in words
    assert engine.leader.process.wait(END_SECONDS) == 3


def segments() -> set[str]:
    """Names in shared memory that vLLM or this engine could have made."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("pekoe-engine-", "psm_", "vllm"))}


def test_engines_that_start_together_do_not_meet_and_a_killed_rank_takes_its_own_along(model: Path) -> None:
    """Two engines of two ranks begin at once; then one loses its leader in the middle of decoding, the other one its
    idle follower."""
    before = segments()
    first, second = made = [TwoRanks(model), TwoRanks(model)]
    try:
        for one in made:
            one.await_build()
        assert segments() <= before, "a name that is there could be left there"
        answers = [one.leader.ask("generate", requests=requests()) for one in made]
        assert answers[0] == answers[1]
        children = [
            child for one in made for rank in one.ranks for child in psutil.Process(rank.process.pid).children()
        ]
        first.leader.send("begin", requests=requests(max_new_tokens=200))
        while first.leader.ask("gauges")["running"] < 1:
            time.sleep(0.01)
        for killed, other in ((first.leader, first.follower), (second.follower, second.leader)):
            os.kill(killed.process.pid, signal.SIGKILL)
            assert other.process.wait(END_SECONDS) == 3
        assert psutil.wait_procs(children, timeout=END_SECONDS)[1] == []
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(split_address(first.address), timeout=5)
    finally:
        for one in made:
            one.close()
    assert segments() <= before


@pytest.mark.timeout(300)
def test_a_run_trains_with_an_engine_over_two_ranks(tmp_path: Path) -> None:
    """The follower runs no workflow and writes no shard, and confirms every version."""
    before = segments()
    model, sums = write_tiny_model(tmp_path / "model", head_dim=32), write_sums(tmp_path / "sums.jsonl", 40)
    overrides = {**base_overrides(tmp_path, model, sums, "tp"), "allocation": "vllm:d1t2+fsdp:d1"}
    outcome = run(tmp_path, overrides | {"total_train_steps": 3}, timeout=280)
    assert outcome.code == 0, outcome.text[-4000:]
    assert [line["step"] for line in outcome.steps] == [1, 2, 3]
    for line in outcome.steps:
        assert line["train/grad_norm"] > 0
        assert line["weights/logprob_gap_max"] < TOLERANCE
    assert {path.name.rpartition("-")[2] for path in (outcome.run / "shards").glob("0-*")} == {"1"}
    (heartbeats,) = (outcome.run / "heartbeats").glob("node-*.json")
    versions = {beat["rank"]: beat["version"] for beat in json.loads(heartbeats.read_text())["ranks"]}
    assert versions[2] == versions[1] >= 2
    assert segments() <= before
