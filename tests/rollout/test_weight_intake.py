"""How the weights of a rank come into its engine: real engines, every mode, and what can go wrong between."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pekoe.pipeline.messages import (
    EngineFailed,
    EngineRestored,
    Inbox,
    LoadWeights,
    Phase,
    PhaseReached,
    PrepareWeights,
    Wake,
    WeightsLoaded,
    WeightsReady,
)
from pekoe.pipeline.rollout import restarting_engine
from pekoe.pipeline.rollout.engine import EngineFailedError
from pekoe.pipeline.rollout.rank_loop import RolloutLoop, RolloutParts
from pekoe.pipeline.rollout.restarting_engine import RestartingEngine
from pekoe.pipeline.rollout.staged_weights import StagedWeights

SECONDS = 30.0


class Rank:
    """The loop of one rank, its messages fed by hand; also its post and its end of a transport."""

    rank = 1

    def __init__(self, engine: Any, mode: str = "interrupt") -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.sent: list[Any] = []
        self.weights: list[tuple[str, torch.Tensor]] = []
        self.breaks_at: int | None = None
        self.on_tensor: Callable[[int], None] = lambda number: None
        self.abandoned: list[str] = []
        self.versions: list[int] = []
        own: Any = self
        self.loop = RolloutLoop(
            RolloutParts(
                own, self.inbox, 0, engine, own, own, [[1, 2, 3, 4]], 64, lambda phase: None, self.versions.append,
                update_mode=mode,
            )
        )  # fmt: skip
        self.loop.executor = own

    def send(self, to: int, message: Any) -> None:
        self.sent.append(message)

    def prepare(self, message: PrepareWeights) -> None: ...

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(self.weights):
            if number == self.breaks_at:
                raise ConnectionError("the sender is gone")
            self.on_tensor(number)
            yield name, tensor

    def abandon(self, reason: str) -> None:
        self.abandoned.append(reason)

    def ask(self, *messages: Any) -> None:
        for message in messages:
            self.loop.handle(message)

    def turn_until(self, condition: Callable[[], bool]) -> None:
        """Handles what the rank tells itself until then."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.sent
            try:
                self.loop.handle(self.inbox.get(timeout=0.02)[1])
            except queue.Empty:
                continue

    def is_ready(self, version: int, epoch: int) -> bool:
        return WeightsReady(version, epoch) in self.sent

    def update(self, model: Any, version: int, epoch: int = 0) -> WeightsLoaded:
        """One version, as the head asks for it."""
        self.weights = list(model.state_dict().items())
        self.ask(prepare(version, epoch))
        self.turn_until(lambda: self.is_ready(version, epoch))
        self.ask(LoadWeights(version, epoch))
        found = self.sent[-1]
        assert isinstance(found, WeightsLoaded), found
        return found


def prepare(version: int, epoch: int = 0) -> PrepareWeights:
    return PrepareWeights(version, epoch, (0, 1), "here", ())


class Background:
    """Requests that run while the test goes on."""

    def __init__(self, engine: Any, requests: list[Any]) -> None:
        self.responses: list[Any] = []
        self.thread = threading.Thread(target=self._run, args=(engine, requests), daemon=True)
        self.thread.start()

    def _run(self, engine: Any, requests: list[Any]) -> None:
        async def work() -> None:
            self.responses = await asyncio.gather(*(engine.generate(request) for request in requests))

        asyncio.run(work())

    def join(self) -> list[Any]:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.responses


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def check_logprobs(models: Any, by_version: dict[int, Any], prompt: Any, response: Any) -> None:
    """Every token's log-prob is that of the version it names."""
    assert (np.diff(response.versions) >= 0).all()
    whole = [*prompt, *response.tokens]
    for version in set(response.versions.tolist()):
        wanted = models.logprobs(by_version[version], whole)[len(prompt) :]
        at = response.versions == version
        assert np.abs(response.logprobs[at] - wanted[at]).max() < 1e-4


@pytest.mark.parametrize("mode", ["interrupt", "drain", "overlap"])
def test_what_sequences_under_way_do_in_an_update(
    mode: str, models: Any, harness: Any, make_request: Any, prompts: Any, held_up: Callable[[], float]
) -> None:
    old, new = models.build(), models.build(seed=1)
    engine = harness.engine(old, max_slots=3)
    rank = Rank(engine, mode)
    requests = [make_request(p, seed=i, max_new_tokens=100 + 20 * i) for i, p in enumerate(prompts[:6])]
    running = Background(engine, requests)
    wait_for(lambda: engine.gauges()["tokens"] >= 60)
    began = engine.gauges()["tokens"]
    seen: list[float] = []
    rank.on_tensor = lambda number: (time.sleep(0.004), seen.append(engine.gauges()["tokens"]))  # type: ignore[func-returns-value]
    loaded = rank.update(new, 1)
    assert not loaded.error
    assert loaded.seconds < (0.004 * len(seen) + held_up() if mode == "overlap" else SECONDS)
    assert (seen[-1] > seen[0]) == (mode == "overlap"), "decoding goes on while tensors arrive in overlap only"
    if mode == "drain":
        assert seen[0] > began + 100
    responses = running.join()
    assert engine.gauges()["serving"] == 1
    mixed = 0
    for prompt, response in zip(prompts, responses, strict=False):
        check_logprobs(models, {0: old, 1: new}, prompt, response)
        mixed += len(set(response.versions.tolist())) > 1
    whole = [response.versions.tolist() for response in responses]
    if mode == "drain":
        assert mixed == 0
        assert sum(set(versions) == {0} for versions in whole) == 3, "those in the rows have finished"
    else:
        assert mixed >= 1
    assert rank.versions == [1]


def test_a_new_turn_waits_while_the_engine_drains(models: Any, harness: Any, make_request: Any, prompts: Any) -> None:
    """An episode's next request comes in the drain: it waits, nothing dead-locks, and the new version samples it."""
    old, new = models.build(), models.build(seed=1)
    engine = harness.engine(old)
    rank = Rank(engine, "drain")

    class Episodes:
        async def generate(self, request: Any) -> Any:
            first = await engine.generate(request)
            return first, await engine.generate(make_request([*request.tokens, *first.tokens], max_new_tokens=5))

    running = Background(
        Episodes(), [make_request(p, seed=i, max_new_tokens=30 + 20 * i) for i, p in enumerate(prompts[:4])]
    )
    wait_for(lambda: engine.gauges()["tokens"] >= 20)
    rank.update(new, 1)
    for first, second in running.join():
        assert set(first.versions) == {0}
        assert set(second.versions) == {1}


def test_a_deterministic_group_finishes_whole_in_a_drain(
    models: Any, harness: Any, make_request: Any, prompts: Any
) -> None:
    old, new = models.build(), models.build(seed=1)
    engine = harness.engine(old, max_slots=4, deterministic=True)
    rank = Rank(engine, "drain")
    sizes = {"group_size": 4}
    requests = [
        make_request(prompts[group], seed=9 * group + i, group=group, sample=i, max_new_tokens=40 + 10 * i, **sizes)
        for group in (0, 1)
        for i in range(4)
    ]
    running = Background(engine, requests)
    wait_for(lambda: engine.gauges()["tokens"] >= 20)
    rank.update(new, 1)
    versions = [set(response.versions.tolist()) for response in running.join()]
    assert versions == [{0}] * 4 + [{1}] * 4


def test_staging_buffers_are_used_again(models: Any) -> None:
    staged, before = StagedWeights(), [0]
    for seed in range(3):
        weights = list(models.build(seed=seed).state_dict().items())
        staged.fill(weights)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(staged, weights, strict=True))
        places = [tensor.data_ptr() for _, tensor in staged]
        if seed:
            assert places == before
        before = places
    size = staged.num_bytes
    staged.fill(weights[:2])
    assert 0 < staged.num_bytes < size
    with pytest.raises(ValueError, match="was given twice"):
        staged.fill([weights[0], weights[0]])


@pytest.mark.parametrize("mode", ["interrupt", "drain", "overlap"])
def test_pauses_are_balanced_when_the_transfer_fails(
    mode: str, models: Any, harness: Any, make_request: Any, prompts: Any
) -> None:
    """In overlap decoding never stopped; else nothing is served by half-loaded weights until a load succeeds."""
    engine = harness.engine(models.build())
    rank = Rank(engine, mode)
    for version in (1, 2):
        rank.breaks_at = 3
        loaded = rank.update(models.build(seed=version), version, epoch=2 * version)
        assert "ConnectionError: the sender is gone" in loaded.error
        assert len(rank.abandoned) == version
        assert rank.loop.intake.is_paused == (mode != "overlap")
        assert engine.gauges()["serving"] == (mode == "overlap")
        if mode == "overlap":
            (response,) = harness.generate(engine, [make_request(prompts[0], max_new_tokens=3)])
            assert set(response.versions) == {version - 1}
        rank.breaks_at = None
        assert not rank.update(models.build(seed=version), version, epoch=2 * version + 1).error
        assert not rank.loop.intake.is_paused
        (response,) = harness.generate(engine, [make_request(prompts[0], max_new_tokens=3)])
        assert set(response.versions) == {version}


def test_a_later_order_replaces_an_earlier_one(models: Any, harness: Any) -> None:
    """Whoever was too slow answers to the newest only; what the head does not wait for any more is not loaded."""
    engine = harness.engine(models.build())
    rank = Rank(engine)
    pause, may_stop = engine.pause, threading.Event()

    def slow(*, drain: bool = False) -> None:
        assert may_stop.wait(SECONDS)
        pause(drain=drain)

    engine.pause = slow
    rank.weights = list(models.build(seed=1).state_dict().items())
    rank.ask(prepare(1, 0), prepare(2, 1), prepare(2, 2))
    assert rank.sent == []
    assert rank.loop.intake.describe() == "the engine stops for weights"
    may_stop.set()
    rank.turn_until(lambda: rank.is_ready(2, 2))
    assert rank.sent == [WeightsReady(2, 2)]
    rank.ask(LoadWeights(1, 0), LoadWeights(2, 1))
    assert engine.gauges()["version"] == 0
    rank.ask(prepare(2, 3))
    assert rank.sent[-1] == WeightsReady(2, 3), "it stands already"
    rank.ask(LoadWeights(2, 3))
    assert engine.gauges()["version"] == 2
    assert engine.gauges()["serving"] == 1
    rank.ask(LoadWeights(2, 3))
    assert len([m for m in rank.sent if isinstance(m, WeightsLoaded)]) == 1


def test_a_colocated_engine_sleeps_in_the_step_and_wakes_with_its_weights(models: Any, harness: Any) -> None:
    engine = harness.engine(models.build())
    rank = Rank(engine, "drain")
    for version in (1, 2):
        rank.ask(Phase(version - 1))
        assert rank.sent[-1] == PhaseReached(version - 1)
        assert engine.gauges()["serving"] == 0
        rank.ask(Phase(version - 1), Wake(version - 1))
        assert engine.gauges()["serving"] == 1
        rank.ask(Phase(version - 1))
        assert not rank.update(models.build(seed=version), version).error
    assert engine.gauges()["serving"] == 1


class Fragile:
    """A rank whose engine is replaced when it fails."""

    def __init__(self, models: Any, harness: Any, mode: str = "interrupt") -> None:
        self.built: list[Any] = []
        self.inbox: list[Any] = []
        self.rank: Rank | None = None

        def make(on_failure: Any) -> Any:
            self.built.append(harness.engine(models.build(), on_failure=on_failure))
            return self.built[-1]

        def tell(message: Any) -> None:
            assert self.rank is not None
            self.rank.inbox.put((1, message))

        self.engine = RestartingEngine(make, max_restarts=5, tell=tell, fatal=self.inbox.append)
        self.rank = Rank(self.engine, mode)

    def fail(self) -> None:
        self.engine._fail(self.engine._generation, RuntimeError("planted"))


@pytest.mark.parametrize("mode", ["interrupt", "overlap"])
@pytest.mark.parametrize(
    "moment", ["before", "stopping", "ready", "first", "middle", "last", "score", "resume", "after"]
)
def test_an_engine_that_fails_at_any_moment_of_an_update(
    moment: str, mode: str, models: Any, harness: Any, make_request: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head hears of it once, never of a version that is not served; then a new update works, with requests kept."""
    monkeypatch.setattr(restarting_engine, "GONE_SECONDS", 0.05)  # `Fragile` keeps what it has built
    made = Fragile(models, harness, mode)
    rank, first = made.rank, made.built[0]
    assert rank is not None
    running = Background(made.engine, [make_request(p, seed=i, max_new_tokens=24) for i, p in enumerate(prompts[:3])])
    wait_for(lambda: made.engine.gauges()["tokens"] >= 3)
    weights = list(models.build(seed=1).state_dict().items())
    rank.weights = weights

    def failing(*given: Any, **named: Any) -> Any:
        raise RuntimeError("planted")

    def fail_at(number: int) -> None:
        if {"first": 0, "middle": len(weights) // 2, "last": len(weights) - 1}.get(moment) == number:
            made.fail()

    rank.on_tensor = fail_at
    if moment == "before":
        made.fail()
    if moment == "stopping":
        first.pause = failing
    if moment == "score":
        first.logprobs = failing
    if moment == "resume":
        first.resume = failing
    rank.ask(prepare(1))
    if moment in ("before", "stopping") and mode != "overlap":
        rank.turn_until(lambda: rank.loop.intake.is_down)
    elif moment != "before":
        rank.turn_until(lambda: rank.is_ready(1, 0))
    if moment == "ready":
        made.fail()
        rank.turn_until(lambda: rank.loop.intake.is_down)
        assert rank.abandoned == ["the engine has failed"], "members must not wait for it"
    rank.ask(LoadWeights(1, 0))
    if moment == "after":
        made.fail()
    rank.turn_until(lambda: EngineRestored() in rank.sent)
    assert len([m for m in rank.sent if isinstance(m, EngineFailed)]) == 1
    said = [m for m in rank.sent if isinstance(m, WeightsLoaded)]
    assert len(said) == (moment in ("after", "resume"))
    assert made.engine.gauges()["serving"] == 0
    rank.on_tensor = lambda number: None
    assert not rank.update(models.build(seed=2), 2, epoch=1).error
    assert made.engine.gauges()["serving"] == 1
    by_version = {0: models.build(), 1: models.build(seed=1), 2: models.build(seed=2)}
    for prompt, response in zip(prompts, running.join(), strict=False):
        check_logprobs(models, by_version, prompt, response)
        assert len(response.tokens) == 24
    assert made.inbox == []


def test_an_engine_without_a_keeper_says_why_it_failed(models: Any, harness: Any) -> None:
    engine = harness.engine(models.build())
    rank = Rank(engine)
    engine._stop_with(RuntimeError("planted"))
    rank.ask(prepare(1))
    with pytest.raises(EngineFailedError, match="planted"):
        rank.turn_until(lambda: False)
