"""One meaning of a log-prob: raw, at the sampling temperature, of the token that was sampled; equal to transformers."""

from __future__ import annotations

import numpy as np
import pytest

from pekoe.pipeline.rollout.engine import Instance
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_sampled_logprobs_equal_a_forward_pass_at_the_temperature(vllm_models, engines, make_request, prompts, kind):
    folder = vllm_models.folder(kind)
    engine = engines(folder)
    requests = [
        make_request(
            p, seed=i, temperature=0.7 if i % 2 else 1.3, top_k=3 * (i % 3), top_p=0.9 if i % 4 else 1.0, greedy=i == 5,
            max_new_tokens=40, min_new_tokens=i, frequency_penalty=0.5 * (i % 2), logit_bias=((4, 1.5),) * (i == 3),
        )
        for i, p in enumerate(prompts)
    ]  # fmt: skip
    for request, response in zip(requests, engines.generate(engine, requests), strict=True):
        tokens = [*request.tokens, *response.tokens.tolist()]
        wanted = vllm_models.logprobs(folder, tokens, request.sampling.temperature)[len(request.tokens) :]
        assert len(response.tokens) == len(response.logprobs) == len(response.versions) == 40
        assert np.abs(response.logprobs - wanted).max() < 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_scored_logprobs_equal_a_forward_pass(vllm_models, engines, temperature):
    folder = vllm_models.folder()
    engine = engines(folder, max_num_batched_tokens=64)
    generator = np.random.default_rng(3)
    lengths = [0, 1, 2, 3, 31, 32, 33, 64, 65, 130, 256, 9, 10, 11]
    sequences = [generator.integers(0, 16, length).astype(np.int32) for length in lengths]
    engine.pause()
    scored = engine.logprobs(sequences, temperature)
    engine.resume()
    for sequence, found in zip(sequences, scored, strict=True):
        assert (found.dtype, found.shape) == (np.float32, sequence.shape)
        if len(sequence):
            assert np.abs(found - vllm_models.logprobs(folder, sequence, temperature)).max() < 1e-4


def test_scoring_leaves_the_sequences_under_way_as_they_were(vllm_models, engines, make_request, prompts):
    engine = engines()
    requests = [make_request(p, seed=i, max_new_tokens=60) for i, p in enumerate(prompts)]
    undisturbed = engines.generate(engine, requests)
    scored = []

    def score() -> None:
        scored.extend(engine.logprobs([np.arange(3, 15, dtype=np.int32)], 0.7))

    for response, wanted in zip(engines.interrupted(engine, requests, 40, score), undisturbed, strict=True):
        assert response.tokens.tolist() == wanted.tokens.tolist()
        np.testing.assert_allclose(response.logprobs, wanted.logprobs, atol=1e-5)
    wanted = vllm_models.logprobs(vllm_models.folder(), np.arange(3, 15), 0.7)
    assert np.abs(scored[0] - wanted).max() < 1e-4


def test_scoring_refuses_what_does_not_fit(engines):
    engine = engines()
    with pytest.raises(RuntimeError, match="needs a paused engine"):
        engine.logprobs([np.zeros(4, np.int32)])
    engine.pause()
    with pytest.raises(ValueError, match=r"257 tokens; allowed: up to gconfig.max_tokens \(256\)"):
        engine.logprobs([np.zeros(257, np.int32)])
    engine.resume()


def test_the_same_seeds_give_the_same_tokens_as_the_hf_engine(engines, make_request, prompts):
    requests = [
        make_request(p, seed=i, temperature=1.2, top_p=0.8 if i % 2 else 1.0, top_k=i % 5, max_new_tokens=40)
        for i, p in enumerate(prompts)
    ]
    settings = engines.settings()
    hf = HfEngine.build(settings, Instance())
    wanted = engines.generate(hf, requests)
    hf.close()
    for response, other in zip(engines.generate(engines(), requests), wanted, strict=True):
        assert response.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(response.logprobs, other.logprobs, atol=1e-4)
