"""What a colocated rank asks of its engine between two phases, recorded in the engine's own process."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from child_worlds import settings

from pekoe.pipeline.messages import EngineFailed, LoadWeights, PhaseReached, PrepareWeights, WeightsLoaded, WeightsReady
from pekoe.pipeline.rollout.child.child_engine import ChildEngine
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.weight_intake import WeightIntake

HEAD = 0


class Source:
    """The receiving end of a transport: what came, and whether it was given up."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.abandoned: list[str] = []

    def prepare(self, message: PrepareWeights) -> None:
        """Nothing to connect."""

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, torch.ones(2)) for name in self.names)

    def abandon(self, reason: str) -> None:
        self.abandoned.append(reason)


@pytest.fixture(scope="module")
def engine() -> Iterator[ChildEngine]:
    with EngineNursery() as nursery:
        made = ChildEngine(nursery, "child_worlds:EchoEngine", settings())
        yield made
        made.close()


def intake_of(engine: ChildEngine, source: Source) -> tuple[WeightIntake, list[Any]]:
    told: list[Any] = []
    parts: Any = SimpleNamespace(
        engine=engine, weights=source, inbox=queue.SimpleQueue(), head=HEAD, update_mode="interrupt",
        post=SimpleNamespace(rank=0, send=lambda rank, message: told.append(message)),
        check_sequences=[[1, 2]], sampling=SimpleNamespace(temperature=1.0),
        set_phase=lambda phase: None, set_version=lambda version: None,
    )  # fmt: skip
    return WeightIntake(parts), told


def notes(engine: ChildEngine, folder: Path) -> list[str]:
    engine.load_adapter("notes", folder, 0)
    return (folder / "notes").read_text().split("\n")[3:]


def test_weights_come_before_the_cache(engine: ChildEngine, tmp_path: Path) -> None:
    intake, told = intake_of(engine, Source("weight"))
    intake.rest(1)
    intake.prepare(PrepareWeights(1, 0, (HEAD, 0), "", ()))
    intake.load(LoadWeights(1, 0))
    assert notes(engine, tmp_path) == [
        "pause False", "sleep", "load 1", "weight float32 (2,) 2", "wake", "resume",
    ]  # fmt: skip
    assert [type(message) for message in told] == [PhaseReached, WeightsReady, WeightsLoaded]
    assert told[-1].check == tuple(np.array([1, 2], np.float32))


def test_a_load_that_fails_leaves_an_engine_that_is_awake(engine: ChildEngine, tmp_path: Path) -> None:
    source = Source("wrong")
    intake, told = intake_of(engine, source)
    before = len(notes(engine, tmp_path))
    intake.rest(2)
    intake.prepare(PrepareWeights(2, 0, (HEAD, 0), "", ()))
    intake.load(LoadWeights(2, 0))
    assert notes(engine, tmp_path)[before:] == ["pause False", "sleep", "load 2", "wake"]
    assert len(source.abandoned) == 1
    assert "'wrong' is not in the model" in told[-1].error
    source.names = ("weight",)
    intake.prepare(PrepareWeights(2, 1, (HEAD, 0), "", ()))
    intake.load(LoadWeights(2, 1))
    assert told[-1].error == ""


def test_an_engine_that_fails_in_its_sleep_is_woken_for_the_next_one(engine: ChildEngine, tmp_path: Path) -> None:
    """Nothing is built on a device that is the trainer's; once an update is prepared it is not any more."""
    source = Source("weight")
    intake, _ = intake_of(engine, source)
    intake.rest(3)
    intake.prepare(PrepareWeights(3, 0, (HEAD, 0), "", ()))
    intake.on_failed(EngineFailed("its process has died", 1))
    assert notes(engine, tmp_path)[-1] == "wake"
    assert source.abandoned == ["the engine has failed"]
