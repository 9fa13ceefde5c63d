"""vLLM in a child process: the same answers as in the rank's own, memory by turns, and a colocated run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from pekoe.pipeline.config.vllm_section import VllmConfig
from pekoe.pipeline.rollout.child.child_engine import ChildEngine
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.engine import EngineFailedError, EngineSettings, GenerationRequest, Response

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rollout"))

from child_worlds import alive, engine_processes, eventually
from run_command import base_overrides, run
from test_death import heartbeats

pytestmark = pytest.mark.vllm

MEBI = 1 << 20
CACHE = 256 * MEBI
Request = Callable[..., GenerationRequest]


@pytest.fixture(scope="module")
def nursery() -> Iterator[EngineNursery]:
    with EngineNursery() as made:
        yield made


@pytest.fixture(scope="module")
def config(vllm_models: Any) -> EngineSettings:
    path = str(vllm_models.folder())
    options = VllmConfig(kv_cache_gib=CACHE / (1 << 30))
    return EngineSettings(path, path, "float32", "cpu", 0, 8, 256, sleeps=True, options=options)


@pytest.fixture(scope="module")
def engine(nursery: EngineNursery, config: EngineSettings) -> Iterator[ChildEngine]:
    made = ChildEngine(nursery, "vllm", config, bucket_bytes=MEBI)
    yield made
    made.close()


def sample(engine: ChildEngine, requests: list[GenerationRequest]) -> list[Response]:
    async def work() -> list[Response]:
        return list(await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 60))

    return asyncio.run(work())


def test_its_log_probs_are_those_of_the_weights_that_it_was_given(
    engine: ChildEngine, vllm_models: Any, make_request: Request, prompts: list[list[int]]
) -> None:
    folder = Path(vllm_models.folder())
    requests = [make_request(prompt, seed=n, max_new_tokens=12) for n, prompt in enumerate(prompts)]
    for version, seed in ((1, 3), (2, None)):
        engine.pause()
        engine.load_weights(iter(vllm_models.weights(folder, seed).items()), version)
        scored = engine.logprobs([np.array(prompts[4], np.int32)])[0]
        np.testing.assert_allclose(scored, vllm_models.logprobs(folder, prompts[4], seed=seed), atol=1e-4)
        engine.resume()
        for prompt, response in zip(prompts, sample(engine, requests), strict=True):
            tokens = [*prompt, *response.tokens.tolist()]
            expected = vllm_models.logprobs(folder, tokens, seed=seed)[len(prompt) :]
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)
            assert set(response.versions) == {version}


def test_errors_keep_their_type(engine: ChildEngine, vllm_models: Any) -> None:
    with pytest.raises(ValueError, match=r"request\.tokens"):
        sample(engine, [GenerationRequest((999_999,))])
    engine.pause()
    with pytest.raises(ValueError, match="unknown"):
        engine.load_weights(iter([("unknown", torch.zeros(2))]), 3)
    engine.load_weights(iter(vllm_models.weights(Path(vllm_models.folder())).items()), 3)
    engine.resume()


def test_sleep_gives_the_cache_back_over_twenty_cycles(
    engine: ChildEngine, vllm_models: Any, make_request: Request
) -> None:
    weights = vllm_models.weights(Path(vllm_models.folder()))
    rank, child = psutil.Process(), psutil.Process(engine.pid)
    request = make_request(range(3, 16), max_new_tokens=4)
    awake, asleep, rank_sizes = [], [], []
    for version in range(3, 23):
        engine.pause()
        awake.append(child.memory_info().rss)
        engine.sleep()
        asleep.append(child.memory_info().rss)
        engine.load_weights(iter(weights.items()), version)
        engine.wake()
        engine.resume()
        (response,) = sample(engine, [request])
        assert set(response.versions) == {version}
        rank_sizes.append(rank.memory_info().rss)
    assert min(np.array(awake) - np.array(asleep)) > 0.95 * CACHE, (awake, asleep)
    assert awake[-1] - awake[4] < 8 * MEBI, awake
    assert rank_sizes[-1] - rank_sizes[4] < 8 * MEBI, rank_sizes


def test_a_killed_child_fails_its_requests_in_seconds(
    nursery: EngineNursery, engine: ChildEngine, make_request: Request
) -> None:
    threading.Timer(0.5, os.kill, (engine.pid, signal.SIGKILL)).start()
    with pytest.raises(EngineFailedError, match="SIGKILL"):
        sample(engine, [make_request([3, 4], max_new_tokens=200, seed=n) for n in range(64)] * 4)
    assert eventually(lambda: not alive(engine.pid), 5)


def test_a_colocated_run_trains(vllm_models: Any, sums: Path, tmp_path: Path) -> None:
    """The trainer owns torch's default group in the rank; the engine has its own in the child."""
    overrides = {
        **base_overrides(tmp_path, Path(vllm_models.folder()), sums, "colocated"), "allocation": "vllm:d1|fsdp:d1",
        "rollout.max_head_offpolicyness": 0, "total_train_steps": 3, "vllm.kv_cache_gib": 0.0625,
        "gconfig.max_tokens": 64,
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text
    assert len(outcome.steps) == 3
    assert all(line["staleness/max"] == 0 for line in outcome.steps)
    rank = int(heartbeats(outcome.run)[0]["pid"])
    assert eventually(lambda: not engine_processes(rank), 5)
