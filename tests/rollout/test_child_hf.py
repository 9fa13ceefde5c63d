"""The hf engine in a child process: the same tokens as in the rank's own, memory given back in sleep, none lost."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from child_worlds import eventually, settings
from tiny_model import write_tiny_model

from pekoe.pipeline.rollout.child.child_engine import ChildEngine
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.engine import EngineSettings, GenerationRequest, Instance, SamplingParameters
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine

MEBI = 1 << 20
PROMPT = 1500
ROWS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("child") / "model", layers=8, hidden=64, positions=4096)


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineSettings:
    return settings(str(folder), max_slots=ROWS, context_limit=2 * PROMPT)


@pytest.fixture(scope="module")
def engine(config: EngineSettings) -> Iterator[ChildEngine]:
    with EngineNursery() as nursery:
        made = ChildEngine(nursery, "hf", config, bucket_bytes=MEBI)
        yield made
        made.close()


def test_it_samples_what_an_engine_of_the_rank_samples(engine: ChildEngine, config: EngineSettings) -> None:
    own = HfEngine.build(config, Instance())
    sampling = SamplingParameters(max_new_tokens=12, temperature=0.8)
    requests = [GenerationRequest((3 + n, 4, 5), sampling, seed=n) for n in range(6)]

    async def sample(one: ChildEngine | HfEngine) -> list[tuple[list[int], np.ndarray]]:
        found = await asyncio.gather(*map(one.generate, requests))
        return [(response.tokens.tolist(), response.logprobs) for response in found]

    here, there = asyncio.run(sample(own)), asyncio.run(sample(engine))
    assert [tokens for tokens, _ in there] == [tokens for tokens, _ in here]
    for (_, one), (_, other) in zip(here, there, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    with pytest.raises(ValueError, match=r"request\.tokens: id 999 is not in the vocabulary"):
        asyncio.run(engine.generate(GenerationRequest((999,))))
    own.close()


def test_sleep_gives_the_cache_back_and_the_sequences_go_on(engine: ChildEngine, folder: Path) -> None:
    sampling = SamplingParameters(max_new_tokens=60, ignore_eos=True)
    requests = [GenerationRequest((3 + n,) * PROMPT, sampling, seed=n) for n in range(ROWS)]
    lengths: list[int] = []

    async def sample() -> None:
        lengths.extend(len(r.tokens) for r in await asyncio.gather(*map(engine.generate, requests)))

    before = engine.gauges()["tokens"]
    thread = threading.Thread(target=lambda: asyncio.run(sample()), daemon=True)
    thread.start()
    assert eventually(lambda: engine.gauges()["tokens"] > before + ROWS, 60)
    engine.pause()
    cache = engine.gauges()["cache_bytes"]
    awake = engine.gauges()["resident_bytes"]
    engine.sleep()
    asleep = engine.gauges()["resident_bytes"]
    assert cache > 20 * MEBI
    assert awake - asleep > 0.8 * cache
    engine.wake()
    engine.load_weights(load_weights(folder).items(), 1)
    engine.resume()
    thread.join(120)
    assert lengths == [60] * ROWS


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All names of the model, the tied one included."""
    weights = load_file(folder / "model.safetensors")
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}


def test_twenty_cycles_of_sleep_and_new_weights_take_no_memory(engine: ChildEngine, folder: Path) -> None:
    weights = load_weights(folder)
    rank, child = psutil.Process(), psutil.Process(engine.pid)
    request = GenerationRequest((3,) * 200, SamplingParameters(max_new_tokens=4))
    sizes = []
    for version in range(2, 22):
        asyncio.run(engine.generate(request))
        engine.pause()
        engine.sleep()
        engine.wake()
        engine.load_weights(iter(weights.items()), version)
        engine.resume()
        sizes.append((rank.memory_info().rss, child.memory_info().rss, rank.num_fds(), child.num_fds()))
    growth = np.array(sizes[-1]) - np.array(sizes[4])
    assert growth[0] < 4 * MEBI, sizes
    assert growth[1] < 4 * MEBI, sizes
    assert growth[2:].tolist() == [0, 0]
