"""A teacher on vLLM: in a child process beside an engine of this process, by the wiring of a rollout rank."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.rollout.engine import GenerationRequest, Response
from pekoe.pipeline.runs.engine_setup import build_teacher, start_nursery, teacher_settings

pytestmark = pytest.mark.vllm

TEMPERATURE = 0.7
ROLES = ("rollout",)


def trajectory(prompt: list[int], response: Response, sample: int) -> Trajectory:
    given, sampled = len(prompt), len(response.tokens)
    return Trajectory(
        tokens=np.concatenate([np.array(prompt, np.int32), response.tokens]),
        loss_mask=np.repeat(np.array([0, 1], np.uint8), [given, sampled]),
        logprobs=np.concatenate([np.zeros(given, np.float32), response.logprobs]),
        versions=np.repeat(np.array([-1, 0], np.int32), [given, sampled]),
        turns=np.repeat(np.array([-1, 0], np.int32), [given, sampled]),
        prompt_length=given, reward=0.0, finish=Finish.STOP, sample=sample,
    )  # fmt: skip


@pytest.mark.timeout(180)
def test_it_scores_what_the_engine_of_the_rank_has_sampled(
    engines: Any, vllm_models: Any, make_request: Callable[..., GenerationRequest], prompts: list[list[int]]
) -> None:
    """More sequences than places, longer than one pass; another model than the one that samples."""
    folder = vllm_models.folder("qwen2")
    overrides = [
        f"actor.path={vllm_models.folder()}", f"teacher.path={folder}", "teacher.place=engine",
        "teacher.dtype=float32", f"gconfig.temperature={TEMPERATURE}", "gconfig.max_tokens=256", "gconfig.n_samples=4",
        "rollout.max_slots=8", "vllm.max_num_batched_tokens=64", "actor.mb_spec.max_tokens_per_mb=256",
    ]  # fmt: skip
    config = from_yaml_text("", overrides)
    ranks = SimpleNamespace(rollout=SimpleNamespace(engine="vllm"), colocated=False, roles_of=lambda rank: ROLES)
    nursery = start_nursery(config, ROLES, "vllm")
    assert nursery is not None, "the rank's own engine needs none, its teacher does"
    context: Any = SimpleNamespace(
        config=config, ranks=ranks, world=SimpleNamespace(rank=1), tokenizer_path=str(folder), device=choose("cpu"),
        device_index=0, nursery=nursery, building=threading.Lock(),
    )  # fmt: skip
    assert config.teacher is not None
    assert teacher_settings(context, config.teacher).max_slots == 4
    engine = engines()
    teacher = build_teacher(context)
    assert teacher is not None
    try:
        requests = [make_request(prompt, seed=n, max_new_tokens=100) for n, prompt in enumerate(prompts)]

        async def sample() -> list[Response]:
            return list(await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 60))

        responses = asyncio.run(sample())
        rows = [trajectory(p, r, n) for n, (p, r) in enumerate(zip(prompts, responses, strict=True))]
        asyncio.run(teacher.add_logprobs(Group(1, 0, "x", rows)))
        assert max(len(row.tokens) for row in rows) > 64
        for row in rows:
            row.check()
            expected = vllm_models.logprobs(folder, row.tokens.tolist(), TEMPERATURE)
            np.testing.assert_allclose(row.extra["teacher_logprobs"], np.where(row.loss_mask, expected, 0), atol=2e-4)
    finally:
        teacher.close()
        nursery.close()
