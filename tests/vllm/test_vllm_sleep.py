"""Sleep and wake: memory goes back and comes again, what is not recomputed survives, nothing grows."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytestmark = pytest.mark.vllm

TOKENS = np.arange(3, 15, dtype=np.int32)
CACHE_MIB = 256


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@pytest.fixture
def engine(engines):
    return engines(kv_cache_gib=CACHE_MIB / 1024, sleeps=True)


def test_a_sleeping_engine_holds_no_cache_and_wakes_as_it_was(engine, engines, make_request, prompts, vllm_models):
    folder = vllm_models.folder()
    requests = [make_request(p, seed=i, max_new_tokens=60) for i, p in enumerate(prompts)]
    wanted = engines.generate(engine, requests)
    buffers = {name: buffer.clone() for name, buffer in engine._core.model.named_buffers()}
    assert any("cos_sin_cache" in name for name in buffers)

    def nap() -> None:
        engine.sleep()
        engine.wake()
        awake = resident_mib()
        assert engine.gauges()["cache_bytes"] > (CACHE_MIB - 1) << 20
        engine.sleep()
        assert awake - resident_mib() > 0.95 * CACHE_MIB
        assert engine.gauges()["cache_bytes"] == 0
        for verb in (engine.resume, lambda: engine.logprobs([TOKENS])):
            with pytest.raises(RuntimeError, match="while it sleeps; call wake"):
                verb()
        engine.wake()
        assert np.abs(engine.logprobs([TOKENS])[0] - vllm_models.logprobs(folder, TOKENS)).max() < 1e-4

    for response, other in zip(engines.interrupted(engine, requests, 60, nap), wanted, strict=True):
        assert response.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(response.logprobs, other.logprobs, atol=1e-5)
    for name, buffer in engine._core.model.named_buffers():
        assert (buffer == buffers[name]).all(), name


def test_weights_that_come_while_it_sleeps_serve_after_it(engine, engines, make_request, vllm_models):
    folder = vllm_models.folder()
    engine.pause()
    engine.sleep()
    engine.load_weights(vllm_models.weights(folder, seed=6).items(), 1)
    engine.wake()
    engine.resume()
    response = engines.generate(engine, [make_request([3, 4, 5], max_new_tokens=40)])[0]
    wanted = vllm_models.logprobs(folder, [3, 4, 5, *response.tokens.tolist()], seed=6)[3:]
    assert np.abs(response.logprobs - wanted).max() < 1e-4
    assert response.versions.tolist() == [1] * 40


def test_twenty_nights_do_not_grow_the_process(engine, engines, make_request, prompts, vllm_models):
    folder = vllm_models.folder()
    requests = [make_request(p, seed=i, max_new_tokens=20) for i, p in enumerate(prompts)]
    sizes, answers = [], set()
    for version in range(1, 21):
        answers.add(str([response.tokens.tolist() for response in engines.generate(engine, requests)]))
        engine.pause()
        engine.sleep()
        sizes.append(resident_mib())
        engine.load_weights(vllm_models.weights(folder).items(), version)
        engine.wake()
        engine.resume()
    assert len(answers) == 1
    assert max(sizes[4:]) - sizes[3] < 16, sizes
