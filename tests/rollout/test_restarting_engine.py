"""An engine that fails is replaced: real hf engines on tiny models, one after the other."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pekoe.pipeline.messages import EngineFailed, EngineRestored
from pekoe.pipeline.rollout import restarting_engine
from pekoe.pipeline.rollout.engine import EngineClosedError, EngineFailedError
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine
from pekoe.pipeline.rollout.restarting_engine import RestartingEngine

SECONDS = 30.0


class FragileEngine(HfEngine):
    """Fails once it has decoded so many steps."""

    fail_at = 10**9
    adapters: tuple[tuple[str, int], ...] = ()

    def _turn(self) -> None:
        if self._decoder.num_steps >= self.fail_at:
            raise RuntimeError("planted in the engine")
        super()._turn()

    def load_adapter(self, name: str, folder: Path, version: int) -> None:
        self.adapters = (*self.adapters, (name, version))


class Workshop:
    """Builds engines over copies of one model; `fail_at` is of the n-th."""

    def __init__(self, model: Any, fail_at: tuple[int, ...] = (), max_restarts: int = 3) -> None:
        self.model, self.fail_at = model, fail_at
        self.built: list[FragileEngine] = []
        self.told: list[Any] = []
        self.fatal: list[BaseException] = []
        self.num_asked = 0
        self.may_build = threading.Event()
        self.may_build.set()
        self.build_errors: list[Exception] = []
        self.engine = RestartingEngine(
            self.make, max_restarts=max_restarts, tell=self.told.append, fatal=self.fatal.append
        )

    def make(self, on_failure: Callable[[BaseException], None]) -> FragileEngine:
        self.num_asked += 1
        assert self.may_build.wait(SECONDS)
        if self.build_errors:
            raise self.build_errors.pop(0)
        engine = FragileEngine(
            "", model=copy.deepcopy(self.model), tokenizer=None, dtype="float32", device=torch.device("cpu"),
            max_slots=8, context_limit=256, deterministic=False, on_failure=on_failure,
        )  # fmt: skip
        if len(self.built) < len(self.fail_at):
            engine.fail_at = self.fail_at[len(self.built)]
        self.built.append(engine)
        return engine

    def load(self, model: Any, version: int) -> None:
        """A full update, as the rank loop makes one."""
        self.engine.pause()
        self.engine.load_weights(iter(weights_of(model)), version)
        self.engine.resume()


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def workshop(models: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workshop]]:
    monkeypatch.setattr(restarting_engine, "GONE_SECONDS", 0.2)  # a workshop keeps what it has built
    made: list[Workshop] = []

    def make(**settings: Any) -> Workshop:
        made.append(Workshop(models.build(), **settings))
        return made[-1]

    yield make
    for each in made:
        each.may_build.set()
        each.engine.close()
        for engine in each.built:
            engine.close()


def test_requests_are_issued_again_and_answered_by_the_next_engine(
    workshop: Any, harness: Any, models: Any, make_request: Any, prompts: Any
) -> None:
    """All of them, with the same seeds, and nothing before the new engine has had a full load."""
    shop, new = workshop(fail_at=(12,)), models.build(seed=1)
    requests = [make_request(p, seed=i, max_new_tokens=20 + i) for i, p in enumerate(prompts)]
    wanted = harness.generate(harness.engine(new), requests)

    async def work() -> Any:
        tasks = [asyncio.ensure_future(shop.engine.generate(request)) for request in requests]
        await asyncio.to_thread(wait_for, lambda: EngineRestored() in shop.told)
        await asyncio.sleep(0.1)
        assert shop.engine.gauges()["tokens"] == shop.built[0].gauges()["tokens"], "nothing was sampled yet"
        assert not any(task.done() for task in tasks if task not in done_before(tasks))
        await asyncio.to_thread(shop.load, new, 7)
        return await asyncio.gather(*tasks)

    def done_before(tasks: list[Any]) -> list[Any]:
        return [task for task in tasks if task.done() and (task.result().versions == 0).all()]

    responses = harness.run(work())
    assert shop.told == [EngineFailed("RuntimeError: planted in the engine", 1), EngineRestored()]
    assert len(shop.built) == 2
    again = [i for i, response in enumerate(responses) if (response.versions == 7).all()]
    assert len(again) >= len(requests) - 4
    for i in again:
        assert responses[i].tokens.tolist() == wanted[i].tokens.tolist()
        np.testing.assert_allclose(responses[i].logprobs, wanted[i].logprobs, atol=1e-5)
    gauges = shop.engine.gauges()
    assert (gauges["restarts"], gauges["down"], gauges["waiting"], gauges["running"]) == (1, 0, 0, 0)
    assert gauges["tokens"] > sum(len(r.tokens) for r in responses) - 1


@pytest.mark.parametrize("was_paused", [False, True])
def test_the_book_keeping_of_pauses_holds_over_a_failure(
    was_paused: bool, workshop: Any, harness: Any, make_request: Any, prompts: Any
) -> None:
    shop = workshop()
    if was_paused:
        shop.engine.pause()
    shop.engine._fail(0, RuntimeError("planted"))
    wait_for(lambda: EngineRestored() in shop.told)
    if was_paused:
        with pytest.raises(RuntimeError, match="while it is paused"):
            shop.engine.pause()
        shop.engine.resume()
    else:
        with pytest.raises(RuntimeError, match="needs a paused engine"):
            shop.engine.resume()
    assert shop.built[1].gauges()["serving"] == 0, "resumed or not: it has no current weights"
    for _ in range(3):
        shop.load(shop.model, 2)
    assert shop.built[1].gauges()["serving"] == 1
    (response,) = harness.generate(shop.engine, [make_request(prompts[0], max_new_tokens=4)])
    assert response.versions.tolist() == [2] * 4


def test_a_request_for_a_later_version_waits_for_it_over_a_failure(
    workshop: Any, harness: Any, make_request: Any, prompts: Any
) -> None:
    shop = workshop()

    async def work() -> Any:
        task = asyncio.ensure_future(shop.engine.generate(make_request(prompts[1], min_version=3, max_new_tokens=5)))
        await asyncio.sleep(0.05)
        shop.engine._fail(0, RuntimeError("planted"))
        await asyncio.to_thread(wait_for, lambda: EngineRestored() in shop.told)
        await asyncio.to_thread(shop.load, shop.model, 2)
        await asyncio.sleep(0.1)
        assert not task.done()
        await asyncio.to_thread(shop.load, shop.model, 3)
        return await task

    assert harness.run(work()).versions.tolist() == [3] * 5


def test_a_source_that_fails_is_not_the_engines_failure(workshop: Any, models: Any) -> None:
    shop = workshop()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights_of(models.build(seed=1))[:3]
        raise ConnectionError("the sender is gone")

    shop.engine.pause()
    with pytest.raises(ConnectionError):
        shop.engine.load_weights(broken(), 1)
    shop.engine.resume()
    assert shop.built[0].gauges()["serving"] == 0
    assert not shop.told
    shop.load(shop.model, 1)
    assert shop.built[0].gauges()["serving"] == 1


def test_an_engine_that_fails_in_a_load_is_replaced(workshop: Any, models: Any) -> None:
    shop = workshop()
    weights = weights_of(models.build(seed=1))
    taken: list[str] = []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in [*weights[:4], ("model.extra", torch.zeros(1)), *weights[4:]]:
            taken.append(name)
            yield name, tensor

    shop.engine.pause()
    with pytest.raises(EngineFailedError, match=r"'model\.extra' is not in the model") as raised:
        shop.engine.load_weights(counted(), 1)
    assert isinstance(raised.value.__cause__, ValueError)
    assert len(taken) == 5, "half way"
    wait_for(lambda: EngineRestored() in shop.told)
    shop.engine.load_weights(iter(weights), 1)
    shop.engine.resume()
    assert shop.built[1].gauges()["serving"] == 1
    assert shop.built[1].gauges()["version"] == 1


def test_over_the_bound_it_is_fatal_and_names_the_cause(
    workshop: Any, harness: Any, make_request: Any, prompts: Any
) -> None:
    shop = workshop(fail_at=(5, 5, 5, 5), max_restarts=2)

    async def work() -> None:
        task = asyncio.ensure_future(shop.engine.generate(make_request(prompts[0], max_new_tokens=50)))
        for number in (1, 2):
            await asyncio.to_thread(wait_for, lambda n=number: shop.told.count(EngineRestored()) == n)
            await asyncio.to_thread(shop.load, shop.model, number)
        await asyncio.to_thread(wait_for, lambda: bool(shop.fatal))
        await asyncio.sleep(0.1)
        assert not task.done(), "nobody is answered wrongly while the world ends"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    harness.run(work())
    (error,) = shop.fatal
    assert "failed 3 times (rollout.max_engine_restarts is 2): RuntimeError: planted in the engine" in str(error)
    assert str(error.__cause__) == "planted in the engine"
    assert [m.restarts for m in shop.told if isinstance(m, EngineFailed)] == [1, 2]
    assert len(shop.built) == 3


def test_an_engine_that_is_never_built_anew_says_why() -> None:
    fatal: list[BaseException] = []
    hooks: list[Callable[[BaseException], None]] = []

    def make(on_failure: Callable[[BaseException], None]) -> Any:
        hooks.append(on_failure)
        return SimpleNamespace(close=lambda: None)

    RestartingEngine(make, max_restarts=0, tell=fatal.append, fatal=fatal.append, limit="one over 2 ranks is not")
    hooks[0](RuntimeError("planted"))
    assert str(fatal[0]) == "the engine has failed once (one over 2 ranks is not): RuntimeError: planted"


def test_a_build_that_fails_counts_too(workshop: Any) -> None:
    shop = workshop()
    shop.build_errors = [OSError("no memory"), OSError("no memory")]
    shop.engine._fail(0, RuntimeError("planted"))
    wait_for(lambda: EngineRestored() in shop.told)
    assert [m.reason for m in shop.told[:-1]] == ["RuntimeError: planted", "OSError: no memory", "OSError: no memory"]
    assert len(shop.built) == 2
    assert not shop.fatal


def test_a_failed_engine_is_gone_before_the_next_one_is_built(
    workshop: Any, harness: Any, make_request: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights would be there twice; neither the builder nor a request that waits may keep them."""
    monkeypatch.setattr(restarting_engine, "GONE_SECONDS", SECONDS / 2)
    shop = workshop(fail_at=(5,))
    old = weakref.ref(shop.built[0])
    shop.built.clear()
    shop.may_build.clear()

    async def work() -> None:
        task = asyncio.ensure_future(shop.engine.generate(make_request(prompts[0], max_new_tokens=20)))
        await asyncio.to_thread(wait_for, lambda: shop.num_asked == 2)
        kept = old()
        shop.fail_at = ()
        shop.may_build.set()
        await asyncio.to_thread(wait_for, lambda: EngineRestored() in shop.told)
        await asyncio.to_thread(shop.load, shop.model, 1)
        assert len((await task).tokens)
        assert kept is None

    harness.run(work())


def test_a_failed_engine_is_closed_whatever_its_gauges_say(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = workshop()
    monkeypatch.setattr(shop.built[0], "gauges", lambda: 1 / 0)
    shop.engine._fail(0, RuntimeError("planted"))
    wait_for(lambda: EngineRestored() in shop.told)
    with pytest.raises(EngineClosedError):
        shop.built[0].pause()


def test_requests_can_be_cancelled_before_in_and_after_a_failure(
    workshop: Any, harness: Any, make_request: Any, prompts: Any
) -> None:
    shop = workshop()
    shop.may_build.clear()

    async def cancelled(task: Any) -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def work() -> None:
        tasks = [
            asyncio.ensure_future(shop.engine.generate(make_request(p, seed=i, max_new_tokens=200)))
            for i, p in enumerate(prompts[:3])
        ]
        await asyncio.to_thread(wait_for, lambda: shop.engine.gauges()["tokens"] > 20)
        await cancelled(tasks[0])
        shop.engine._fail(0, RuntimeError("planted"))
        await asyncio.to_thread(wait_for, lambda: shop.engine.gauges()["waiting"] == 2)
        assert shop.engine.gauges()["down"] == 1
        await cancelled(tasks[1])
        assert shop.engine.gauges()["waiting"] == 1
        shop.may_build.set()
        await asyncio.to_thread(wait_for, lambda: EngineRestored() in shop.told)
        await asyncio.to_thread(shop.load, shop.model, 1)
        await asyncio.to_thread(wait_for, lambda: shop.engine.gauges()["running"] == 1)
        await cancelled(tasks[2])
        await asyncio.to_thread(wait_for, lambda: shop.engine.gauges()["running"] == 0)

    harness.run(work())


def test_nothing_is_built_on_a_device_that_is_the_trainers(workshop: Any) -> None:
    shop = workshop()
    shop.engine.pause()
    shop.engine.sleep()
    shop.engine._fail(0, RuntimeError("planted"))
    time.sleep(0.3)
    assert len(shop.built) == 1
    with pytest.raises(EngineFailedError, match="built anew"):
        shop.engine.load_weights(iter(()), 1)
    shop.engine.wake()
    wait_for(lambda: EngineRestored() in shop.told)
    shop.engine.load_weights(iter(weights_of(shop.model)), 1)
    shop.engine.resume()
    assert shop.built[1].gauges()["serving"] == 1


def test_an_engine_that_is_to_sleep_when_it_stands_sleeps(workshop: Any) -> None:
    shop = workshop()
    shop.may_build.clear()
    shop.engine._fail(0, RuntimeError("planted"))
    wait_for(lambda: shop.num_asked == 2)
    shop.engine.pause()
    shop.engine.sleep()
    shop.may_build.set()
    wait_for(lambda: EngineRestored() in shop.told)
    with pytest.raises(RuntimeError, match="it sleeps"):
        shop.built[1].resume()


def test_closing_ends_those_that_wait_and_what_is_being_built(
    workshop: Any, harness: Any, make_request: Any, prompts: Any
) -> None:
    shop = workshop()
    shop.may_build.clear()

    async def work() -> None:
        task = asyncio.ensure_future(shop.engine.generate(make_request(prompts[0], max_new_tokens=200)))
        shop.engine._fail(0, RuntimeError("planted"))
        await asyncio.to_thread(wait_for, lambda: shop.engine.gauges()["waiting"] == 1 and shop.num_asked == 2)
        shop.engine.close()
        with pytest.raises(EngineClosedError):
            await task

    harness.run(work())
    shop.may_build.set()
    wait_for(lambda: len(shop.built) == 2 and not shop.built[1]._thread.is_alive())
    assert not [message for message in shop.told if isinstance(message, EngineRestored)]
    with pytest.raises(EngineClosedError):
        shop.engine.pause()


def test_adapters_are_loaded_again_with_the_first_full_load(workshop: Any, tmp_path: Path) -> None:
    shop = workshop()
    shop.engine.pause()
    shop.engine.load_adapter("agent", tmp_path, 3)
    shop.engine.resume()
    shop.engine._fail(0, RuntimeError("planted"))
    wait_for(lambda: EngineRestored() in shop.told)
    assert shop.built[1].adapters == ()
    for version in (4, 5):
        shop.load(shop.model, version)
        assert shop.built[1].adapters == (("agent", 3),), "once: an engine keeps its adapters over its loads"
