"""A rank that lends its device: it joins a transfer whoever speaks first, the head or the leader of its engine."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pekoe.pipeline.messages import (
    Inbox,
    LoadWeights,
    Message,
    PrepareWeights,
    StopRollout,
    TensorSpec,
    WeightsLoaded,
    WeightsReady,
)
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.rl_follower import FollowerLoop, LentWeights
from pekoe.pipeline.weights.disk import DiskTransport
from pekoe.pipeline.weights.transport_setup import TransportSetup

SECONDS = 20.0


@dataclass
class Head:
    """Its letters and what came back."""

    inbox: Inbox = field(default_factory=queue.SimpleQueue)
    heard: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    rank: int = 1
    size: int = 2

    def send(self, to: int, message: Message) -> None:
        assert to == 0
        self.heard.put(message)

    def tell(self, message: Message) -> None:
        self.inbox.put((0, message))


class Transfer:
    """The disk transport between a trainer rank and the one that lends its device."""

    def __init__(self, path: Path, *, overlap: bool = False, limit_seconds: float = SECONDS) -> None:
        run = RunDirectory(path / "run")
        run.create()

        def setup(rank: int) -> TransportSetup:
            role = "rollout" if rank else "trainer"
            return TransportSetup(rank, role, run, torch.device("cpu"), "gloo", "127.0.0.1", 128, 2.0)

        self.sender = DiskTransport.sender(setup(0))
        self.token = self.sender.open_epoch(0, (0, 1))
        self.lent = LentWeights(DiskTransport.receiver(setup(1)), limit_seconds, overlap=overlap)
        self.head = Head()
        self.versions: list[int] = []
        loop = FollowerLoop(self.head, self.head.inbox, self.lent, lambda phase: None, self.versions.append)
        self.outcomes: list[str] = []
        self.thread = threading.Thread(target=lambda: self.outcomes.append(loop.run()), daemon=True)
        self.thread.start()

    def publish(self, version: int) -> None:
        weights = [("a", torch.full((3, 4), float(version))), ("b", torch.full((5,), -float(version)))]
        specs = tuple(TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in weights)
        self.sender.send(version, 0, (0, 1), specs, iter(weights))

    def prepare(self, version: int, epoch: int = 0) -> None:
        self.head.tell(PrepareWeights(version, epoch, (0, 1), self.token, ()))

    def load(self, version: int, epoch: int = 0) -> None:
        self.head.tell(LoadWeights(version, epoch))

    def close(self) -> None:
        self.head.tell(StopRollout("finished"))
        self.thread.join(SECONDS)
        assert self.outcomes == ["finished"]


class Engine(threading.Thread):
    """What the engine's thread does at the leader's Load."""

    def __init__(self, transfer: Transfer, version: int) -> None:
        super().__init__(daemon=True)
        self.transfer, self.version = transfer, version
        self.found: dict[str, torch.Tensor] = {}
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.found = {name: tensor.clone() for name, tensor in self.transfer.lent.receive(self.version)}
        except Exception as error:
            self.error = error

    def result(self) -> dict[str, torch.Tensor]:
        self.join(SECONDS)
        assert self.error is None
        return self.found


@pytest.fixture(params=[False, True], ids=["interrupt", "overlap"])
def transfer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transfer]:
    made = Transfer(tmp_path, overlap=request.param)
    yield made
    made.close()


def test_a_load_of_the_leader_waits_for_the_heads_word(transfer: Transfer) -> None:
    engine = Engine(transfer, 3)
    time.sleep(0.1)
    assert engine.is_alive()
    transfer.publish(3)
    transfer.prepare(3)
    transfer.load(3)
    assert transfer.head.heard.get(timeout=SECONDS) == WeightsReady(3, 0)
    assert engine.result()["a"].tolist() == torch.full((3, 4), 3.0).tolist()
    loaded = transfer.head.heard.get(timeout=SECONDS)
    assert isinstance(loaded, WeightsLoaded)
    assert (loaded.version, loaded.check, loaded.error) == (3, (), "")
    assert transfer.versions == [3]


def test_nothing_is_confirmed_before_the_engine_has_taken_it(transfer: Transfer) -> None:
    for version in (1, 2):
        transfer.publish(version)
        transfer.prepare(version)
        transfer.load(version)
        assert transfer.head.heard.get(timeout=SECONDS) == WeightsReady(version, 0)
        time.sleep(0.1)
        assert transfer.head.heard.empty()
        assert Engine(transfer, version).result()["b"].tolist() == [-version] * 5
        loaded = transfer.head.heard.get(timeout=SECONDS)
        assert isinstance(loaded, WeightsLoaded)
        assert loaded.version == version
    assert transfer.versions == [1, 2]


def test_a_version_that_comes_again_is_confirmed_again(transfer: Transfer) -> None:
    transfer.publish(1)
    for _ in range(2):
        transfer.prepare(1)
        transfer.load(1)
        assert transfer.head.heard.get(timeout=SECONDS) == WeightsReady(1, 0)
        time.sleep(0.1)
        assert transfer.head.heard.empty()
        Engine(transfer, 1).result()
        assert isinstance(transfer.head.heard.get(timeout=SECONDS), WeightsLoaded)


def test_a_version_that_never_comes_is_an_error(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path, limit_seconds=0.2)
    engine = Engine(transfer, 4)
    engine.join(SECONDS)
    assert isinstance(engine.error, TimeoutError)
    assert "loads weights version 4" in str(engine.error)
    assert "last told of none" in str(engine.error)
    transfer.close()


def test_beside_decoding_nothing_is_received_before_all_members_are_ready(tmp_path: Path) -> None:
    """A receiver's limits count from there, and the membership may change until then."""
    transfer = Transfer(tmp_path, overlap=True)
    transfer.prepare(5)
    assert transfer.head.heard.get(timeout=SECONDS) == WeightsReady(5, 0)
    transfer.load(4)
    transfer.load(5, epoch=1)
    time.sleep(0.1)
    assert transfer.lent._stager is None
    transfer.publish(5)
    transfer.load(5)
    assert Engine(transfer, 5).result()["a"][0, 0].item() == 5.0
    transfer.close()


def test_a_transfer_that_breaks_beside_decoding_is_told_and_forgotten_with_the_next(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path, overlap=True)
    transfer.prepare(5)
    assert transfer.head.heard.get(timeout=SECONDS) == WeightsReady(5, 0)
    transfer.load(5)
    told = transfer.head.heard.get(timeout=SECONDS)
    assert isinstance(told, WeightsLoaded)
    assert (told.version, bool(told.error)) == (5, True)
    transfer.publish(6)
    transfer.prepare(6, epoch=1)
    transfer.load(6, epoch=1)
    assert transfer.head.heard.get(timeout=SECONDS) == WeightsReady(6, 1)
    assert Engine(transfer, 6).result()["a"][0, 0].item() == 6.0
    loaded = transfer.head.heard.get(timeout=SECONDS)
    assert isinstance(loaded, WeightsLoaded)
    assert (loaded.version, loaded.error) == (6, "")
    transfer.close()
