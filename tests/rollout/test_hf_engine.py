"""What the hf engine samples equals the model: greedy, log-probs, concurrency, shared prefill, seeds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from pekoe.pipeline.records import Finish
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "moe"])
def test_greedy_equals_generate(models, harness, make_request, prompts, kind):
    model = models.build(kind)
    engine = harness.engine(model)
    responses = harness.generate(engine, [make_request(p, greedy=True, max_new_tokens=20) for p in prompts])
    for prompt, response in zip(prompts, responses, strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert response.tokens.tolist() == wanted.tolist()
        assert response.finish == Finish.LENGTH
        assert response.versions.tolist() == [0] * 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_logprobs_equal_a_full_forward_pass_at_the_temperature(models, harness, make_request, prompts, kind, dtype):
    model = models.build(kind).to(dtype)
    engine = harness.engine(model)
    temperatures = [0.7 if i % 2 else 1.3 for i in range(len(prompts))]
    responses = harness.generate(
        engine,
        [
            make_request(
                p, seed=i, temperature=t, top_k=7 * (i % 3), top_p=0.9 if i % 4 else 1, greedy=i == 5, max_new_tokens=40
            )
            for i, (p, t) in enumerate(zip(prompts, temperatures, strict=True))
        ],
    )  # fmt: skip
    for prompt, temperature, response in zip(prompts, temperatures, responses, strict=True):
        wanted = models.logprobs(model, [*prompt, *response.tokens], temperature)[len(prompt) :]
        assert np.abs(response.logprobs - wanted).max() < 1e-5


def test_uneven_concurrent_requests_equal_one_by_one(models, harness, make_request, prompts):
    model = models.build().double()
    lengths = [3, 60, 1, 25, 110, 7, 2, 40, 18, 90, 33, 5]
    requests = [
        make_request(p, seed=100 + i, max_new_tokens=n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    crowd = harness.generate(harness.engine(model, max_slots=5), requests)
    alone = harness.engine(model, max_slots=1)
    for request, response in zip(requests, crowd, strict=True):
        single = harness.generate(alone, [request])[0]
        assert response.tokens.tolist() == single.tokens.tolist()
        np.testing.assert_allclose(response.logprobs, single.logprobs, atol=1e-5)
        assert len(response.tokens) == request.sampling.max_new_tokens


def test_bfloat16_follows_the_float32_model(models, harness, make_request, prompts):
    model = models.build()
    engine = harness.engine(model, dtype="bfloat16")
    response = harness.generate(engine, [make_request(prompts[1], seed=1, max_new_tokens=30)])[0]
    wanted = models.logprobs(model, [*prompts[1], *response.tokens])[len(prompts[1]) :]
    assert 1e-5 < np.abs(response.logprobs - wanted).mean() < 0.3


def test_sliding_window_equals_a_full_forward_pass(models, harness, make_request, prompts):
    layers = ["sliding_attention", "full_attention"]
    model = models.build("qwen3", use_sliding_window=True, sliding_window=6, max_window_layers=1, layer_types=layers)
    responses = harness.generate(harness.engine(model), [make_request(p, seed=3, max_new_tokens=30) for p in prompts])
    for prompt, response in zip(prompts, responses, strict=True):
        wanted = models.logprobs(model, [*prompt, *response.tokens])[len(prompt) :]
        assert np.abs(response.logprobs - wanted).max() < 1e-5
    full = models.build("qwen3")
    assert np.abs(models.logprobs(full, prompts[4]) - models.logprobs(model, prompts[4])).max() > 1e-3


def test_samples_of_one_prompt_share_its_prefill(models, harness, make_request, prompts):
    model = models.build()
    engine = harness.engine(model, max_slots=16)
    prompt, other = prompts[4], prompts[9]
    requests = [make_request(prompt, seed=i, max_new_tokens=9) for i in range(8)]
    requests += [make_request(other, seed=i, max_new_tokens=9) for i in range(8)]
    engine.pause()
    responses = harness.run(_generate_then_resume(engine, requests))
    assert engine.gauges()["prefilled_tokens"] == len(prompt) + len(other) - 2
    assert engine.gauges()["tokens"] == 16 * 9
    for request, response in zip(requests, responses, strict=True):
        wanted = models.logprobs(model, [*request.tokens, *response.tokens])[len(request.tokens) :]
        assert np.abs(response.logprobs - wanted).max() < 1e-5
    assert len({tuple(response.tokens) for response in responses}) == 16


async def _generate_then_resume(engine, requests):
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    engine.resume()
    return await asyncio.gather(*tasks)


def test_seed_alone_decides_the_completion(models, harness, make_request, prompts):
    model = models.build().double()
    request = make_request(prompts[3], seed=12345, max_new_tokens=50)
    crowd = [make_request(p, seed=i, max_new_tokens=10 + 5 * i) for i, p in enumerate(prompts)]
    first = harness.generate(harness.engine(model), [request])[0]
    second = harness.generate(harness.engine(model, max_slots=13), [*crowd[:6], request, *crowd[6:]])[6]
    third = harness.generate(harness.engine(model), [make_request(prompts[3], seed=12346, max_new_tokens=50)])[0]
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.tokens.tolist() != third.tokens.tolist()


def test_logprobs_of_given_sequences(models, harness, prompts):
    model = models.build("llama", tie_word_embeddings=True)
    engine = harness.engine(model)
    engine.pause()
    sequences = [np.array(p, np.int32) for p in [*prompts, []]]
    found = engine.logprobs(sequences)
    for sequence, logprobs in zip(sequences, found, strict=True):
        assert logprobs.shape == sequence.shape
        assert logprobs.dtype == np.float32
    for prompt, logprobs in zip(prompts, found[:-1], strict=True):
        assert np.abs(logprobs - models.logprobs(model, prompt)).max() < 1e-5


def test_serves_a_folder_on_disk(models, harness, make_request, prompts, tmp_path):
    model = models.build("llama", tie_word_embeddings=True, eos_token_id=[7, 9])
    model.save_pretrained(tmp_path)
    engine = HfEngine(
        str(tmp_path), tokenizer=None, dtype="float32", device=torch.device("cpu"), max_slots=4, context_limit=64,
        deterministic=False,
    )  # fmt: skip
    harness.engines.append(engine)
    response = harness.generate(engine, [make_request(prompts[0], greedy=True, max_new_tokens=12)])[0]
    wanted = model.generate(torch.tensor([prompts[0]]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
    assert response.tokens.tolist() == wanted[len(prompts[0]) :].tolist()


def test_other_models_of_the_process_keep_their_attention(models, harness):
    model = models.build()
    before = model.config._attn_implementation
    harness.engine(model)
    assert model.config._attn_implementation == before
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)


def test_what_cannot_be_served_is_refused_at_the_start(models, harness):
    model = models.build()
    with pytest.raises(ValueError, match=r"gconfig.max_tokens: 257; allowed: 2 to the model's 256"):
        harness.engine(model, context_limit=257)
    with pytest.raises(ValueError, match=r"rollout.dtype: 'int8'"):
        harness.engine(model, dtype="int8")
    with pytest.raises(ValueError, match=r"rollout.max_slots: 0"):
        harness.engine(model, max_slots=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": ()}, "prompt is empty"),
        ({"adapter": "style"}, "request.adapter: .style. is not loaded; allowed: none is"),
        ({"tokens": (1, 96)}, "id 96 is not in the vocabulary; allowed: 0 to 95"),
        ({"tokens": (-1, 3)}, "id -1 is not in the vocabulary"),
        ({"temperature": 0.0}, "gconfig.temperature: 0.0"),
        ({"top_p": 0.0}, "gconfig.top_p: 0.0"),
        ({"top_k": -1}, "gconfig.top_k: -1"),
        ({"seed": -1}, "request.seed: -1"),
        ({"stop": ("x",)}, "gconfig.stop: stop strings need an engine with a tokenizer"),
    ],
)
def test_a_wrong_request_is_refused_and_harms_nobody(models, harness, make_request, fields, message):
    engine = harness.engine(models.build())
    with pytest.raises(ValueError, match=message):
        harness.generate(engine, [make_request(**{"tokens": (1, 2)} | fields)])
    assert len(harness.generate(engine, [make_request((1, 2), max_new_tokens=3)])[0].tokens) == 3


def test_a_model_with_another_kind_of_state_is_refused(harness):
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8)
    with pytest.raises(ValueError, match=r"rollout.backend: the hf engine cannot serve model type 'mamba'"):
        harness.engine(AutoModelForCausalLM.from_config(config))
