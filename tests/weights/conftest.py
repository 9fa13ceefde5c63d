"""A sender in this process and receivers in processes of their own, over loopback."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from pekoe.pipeline.messages import PrepareWeights, TensorSpec
from pekoe.pipeline.registry import WEIGHT_TRANSPORTS, resolve
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.weights.transport_setup import TransportSetup

torch.set_num_threads(1)
Weights = list[tuple[str, torch.Tensor]]


def specs_of(weights: Weights) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights)


def described(weights: Weights) -> list[list[Any]]:
    """What a receiver must answer: name, shape, dtype, CRC of the bytes."""
    return [
        [n, list(t.shape), str(t.dtype), zlib.crc32(t.contiguous().view(-1).view(torch.uint8).numpy().data)]
        for n, t in weights
    ]


class Counted:
    """An iterator of tensors that knows how far it was taken."""

    def __init__(self, weights: Weights, fail_at: int = -1) -> None:
        self.weights, self.taken, self.fail_at = weights, 0, fail_at

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self.taken == self.fail_at:
            raise RuntimeError("gather failed")
        if self.taken == len(self.weights):
            raise StopIteration
        self.taken += 1
        return self.weights[self.taken - 1]


class ReceiverProcess:
    """A receiver that works through jobs; every answer has a time limit."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.num_waiting = 0
        """Answers that have not come yet."""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("receiver_process.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)

    def ask(self, message: PrepareWeights, **job: Any) -> None:
        self.tell({"prepare": msgspec.to_builtins(message), **job})

    def tell(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.num_waiting += 1
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 100) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.answers.get(timeout=seconds))
        self.num_waiting -= 1
        return found

    @property
    def is_idle(self) -> bool:
        """Whether another test can have it."""
        return self.process.poll() is None and self.num_waiting == 0 and not self.environment

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


class TransferWorld:
    """Rank 0 sends, ranks 1… receive."""

    def __init__(
        self, idle: list[ReceiverProcess], run: RunDirectory, transport: str, receivers: int, **settings: Any
    ) -> None:
        self._idle = idle
        options = {"bucket_bytes": 1024, "bucket_seconds": 20.0, "verify": False, **settings}
        per_rank = options.pop("environment", {})
        setup = TransportSetup(0, "trainer", run, torch.device("cpu"), "gloo", "127.0.0.1", **options)
        self.sender = resolve(WEIGHT_TRANSPORTS, transport, "transport").sender(setup)
        self.receivers: dict[int, ReceiverProcess] = {}
        for rank in range(1, receivers + 1):
            mine = {**options, "rank": rank, "transport": transport, "run": str(run.path)}
            environment = per_rank.get(rank, {})
            self.receivers[rank] = ReceiverProcess(environment) if environment or not idle else idle.pop()
            self.receivers[rank].tell({"options": mine})
        for rank, receiver in self.receivers.items():
            assert receiver.answer() == {"up": rank}
        self.endpoint: dict[int, str] = {}

    def transfer(
        self, version: int, epoch: int, weights: Weights, *, specs: Sequence[TensorSpec] | None = None,
        jobs: dict[int, dict[str, Any]] | None = None, ranks: Sequence[int] | None = None,
        counted: Counted | None = None,
    ) -> Counted:  # fmt: skip
        """One version to all (or some) receivers; raises what the sender raises."""
        chosen = tuple(ranks or self.receivers)
        members = (0, *chosen)
        is_new = epoch not in self.endpoint
        if is_new:
            self.endpoint[epoch] = self.sender.open_epoch(epoch, members)
        announced = tuple(specs) if specs is not None else specs_of(weights)
        endpoint = self.endpoint[epoch] if is_new else ""
        message = PrepareWeights(version, epoch, members, endpoint, announced if is_new else ())
        for rank in chosen:
            self.receivers[rank].ask(message, **(jobs or {}).get(rank, {}))
        counted = counted or Counted(weights)
        self.last = counted
        self.sender.send(version, epoch, members, specs_of(weights), counted)
        return counted

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers.values():
            if receiver.is_idle:
                self._idle.append(receiver)
            else:
                receiver.end()


@pytest.fixture(scope="session")
def idle_receivers() -> Iterator[list[ReceiverProcess]]:
    """Processes that have imported torch, for the next test."""
    idle: list[ReceiverProcess] = []
    yield idle
    for receiver in idle:
        receiver.end()


@pytest.fixture
def world(tmp_path: Path, idle_receivers: list[ReceiverProcess]) -> Iterator[Callable[..., TransferWorld]]:
    made: list[TransferWorld] = []

    def make(transport: str, receivers: int, **settings: Any) -> TransferWorld:
        run = RunDirectory(tmp_path / "run")
        run.create()
        made.append(TransferWorld(idle_receivers, run, transport, receivers, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def model(seed: int, tensors: int = 9, dtype: torch.dtype = torch.float32) -> Weights:
    """Uneven tensors, one larger than a 1 KiB bucket, a scalar, an empty one, and a tied pair under two names."""
    generator = torch.Generator().manual_seed(seed)
    weights = [(f"layer.{i}.weight", torch.randn(3 + 5 * i, 7, generator=generator).to(dtype)) for i in range(tensors)]
    weights.append(("big", torch.randn(40, 33, generator=generator).to(dtype)))
    weights.append(("scale", torch.randn((), generator=generator)))
    weights.append(("nothing", torch.empty(0, 4)))
    tied = torch.randn(11, 5, generator=generator).to(torch.bfloat16)
    return [*weights, ("embed.weight", tied), ("lm_head.weight", tied)]


@pytest.fixture
def kit() -> SimpleNamespace:
    """What tests share; test files cannot import each other."""
    return SimpleNamespace(model=model, described=described, specs_of=specs_of, Counted=Counted)
