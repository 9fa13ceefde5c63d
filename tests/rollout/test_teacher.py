"""A teacher on an engine of its own: what it says of sampled tokens, when it fails, and how a group gets it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_executor import Rig, sample_once

from pekoe.pipeline.messages import Assign, Rejected
from pekoe.pipeline.records import Example, Finish, Float32, Group, Int32, Trajectory
from pekoe.pipeline.rollout.engine import EngineFailedError, EngineSettings, InferenceEngine, Instance
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine
from pekoe.pipeline.rollout.teacher import Teacher
from pekoe.pipeline.rollout.workflow import EpisodeEngine

TEMPERATURE = 0.7
VOCABULARY = 11
"""The least of the models'."""


def hf_engine(model: Path) -> HfEngine:
    return HfEngine.build(EngineSettings(str(model), str(model), "float32", "cpu", 0, 2, 64), Instance())


class Fragile:
    """The real engine, but for the calls that are to fail."""

    def __init__(self, engine: HfEngine, fails: Callable[[], bool]) -> None:
        self.engine, self.fails, self.closed = engine, fails, False

    def pause(self) -> None:
        self.engine.pause()

    def logprobs(self, sequences: list[Int32], temperature: float = 1.0) -> list[Float32]:
        if self.fails():
            raise EngineFailedError("its process died")
        return self.engine.logprobs(sequences, temperature)

    def close(self) -> None:
        self.closed = True
        self.engine.close()


def trajectory(length: int, sample: int = 0) -> Trajectory:
    rng = np.random.default_rng([length, sample])
    mask = np.ones(length, np.uint8)
    mask[:3] = 0
    mask[5] = 0
    active = mask != 0
    return Trajectory(
        tokens=rng.integers(3, VOCABULARY, length).astype(np.int32), loss_mask=mask,
        logprobs=np.where(active, -1, 0).astype(np.float32), versions=np.where(active, 0, -1).astype(np.int32),
        turns=np.where(active, 0, -1).astype(np.int32), prompt_length=3, reward=0.0, finish=Finish.STOP, sample=sample,
    )  # fmt: skip


def by_transformers(model: Path, tokens: Int32) -> Float32:
    """Log-probs of a sequence's tokens, the first 0."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = loaded(input_ids=ids).logits[0, :-1] / TEMPERATURE
    found = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], found.numpy()]).astype(np.float32)


def test_it_scores_whole_groups_at_the_sampling_temperature(tiny_model: Path) -> None:
    teacher = Teacher(lambda: hf_engine(tiny_model), TEMPERATURE, 64)
    groups = [Group(n, 0, "x", [trajectory(8 + n, sample) for sample in range(3)]) for n in range(4)]

    async def all_at_once() -> None:
        await asyncio.gather(*(teacher.add_logprobs(group) for group in groups))

    asyncio.run(all_at_once())
    assert teacher.gauges() == {"waiting": 0.0, "scored": 12.0}
    assert teacher.progress() == (12.0, False)
    for group in groups:
        for one in group.trajectories:
            one.check()
            wanted = np.where(one.loss_mask != 0, by_transformers(tiny_model, one.tokens), 0)
            np.testing.assert_allclose(one.extra["teacher_logprobs"], wanted, atol=2e-5)
            assert one.extra["teacher_logprobs"].dtype == np.float32
    teacher.close()


def test_an_engine_that_fails_is_built_anew_as_often_as_allowed(tiny_model: Path) -> None:
    made: list[Fragile] = []

    def make() -> InferenceEngine:
        number = len(made)
        made.append(Fragile(hf_engine(tiny_model), lambda: number < 2))
        return made[-1]  # type: ignore[return-value]

    teacher = Teacher(make, TEMPERATURE, 64, max_restarts=2)
    group = Group(1, 0, "x", [trajectory(8)])
    asyncio.run(teacher.add_logprobs(group))
    assert "teacher_logprobs" in group.trajectories[0].extra
    assert [engine.closed for engine in made] == [True, True, False]
    made[-1].fails = lambda: True
    with pytest.raises(EngineFailedError, match="its process died"):
        asyncio.run(teacher.add_logprobs(group))
    assert teacher.gauges()["waiting"] == 0
    teacher.close()
    assert made[-1].closed


async def alike(engine: EpisodeEngine, example: Example) -> Trajectory:
    made = await sample_once(engine, example)
    made.tokens %= VOCABULARY
    made.reward = float(example.index)
    return made


def test_the_executor_asks_for_groups_that_go_out_and_for_no_others(tiny_model: Path) -> None:
    teacher = Teacher(lambda: hf_engine(tiny_model), 1.0, 64)
    one = Rig(alike)
    one.executor._complete = teacher.add_logprobs
    one.thread.start()
    one.executor.submit(Assign(1, 0, 9, 4, 1))
    group = one.events.take()
    assert all(t.extra["teacher_logprobs"][t.loss_mask != 0].all() for t in group.trajectories)
    one.executor.submit(Assign(2, 0, 9, 4, 1, drop_equal=True))
    assert isinstance(one.events.take(), Rejected)
    assert teacher.gauges()["scored"] == 4
    teacher._longest = 3
    one.executor.submit(Assign(3, 0, 9, 4, 1))
    rejected = one.events.take()
    assert (rejected.reason, "the teacher takes 3" in rejected.detail) == ("too_long", True)
    one.executor.stop()
    one.thread.join(60)
    teacher.close()


def test_a_teacher_that_cannot_go_on_ends_the_executor(tiny_model: Path) -> None:
    teacher = Teacher(lambda: Fragile(hf_engine(tiny_model), lambda: True), 1.0, 64)  # type: ignore[arg-type, return-value]
    one = Rig(alike)
    one.executor._complete = teacher.add_logprobs
    one.thread.start()
    one.executor.submit(Assign(1, 0, 9, 4, 1))
    one.thread.join(60)
    assert isinstance(one.error, EngineFailedError)
    teacher.close()
