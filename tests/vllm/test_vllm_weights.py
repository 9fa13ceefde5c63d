"""Weights in flight: prefix by the old policy, suffix by the new one; nothing derived from old weights survives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.vllm

TOKENS = np.arange(3, 15, dtype=np.int32)


def gap(vllm_models, folder, request, response, seeds: dict[int, int | None]) -> float:
    """Largest difference of the response's log-probs from those of the policy that each token's version names."""
    tokens = [*request.tokens, *response.tokens.tolist()]
    count = len(request.tokens)
    worst = 0.0
    for version, seed in seeds.items():
        of_version = response.versions == version
        wanted = vllm_models.logprobs(folder, tokens, request.sampling.temperature, seed)[count:]
        worst = max(worst, float(np.abs(wanted - response.logprobs)[of_version].max(initial=0)))
    return worst


@pytest.mark.parametrize(("kind", "temperature"), [("moe", 1.0), ("qwen3", 0.7), ("qwen3", 1.0)])
def test_a_prefix_matches_the_old_policy_and_the_suffix_the_new_one(
    vllm_models, engines, make_request, prompts, kind, temperature
):
    folder = vllm_models.folder(kind)
    engine = engines(folder)
    requests = [make_request(p, seed=i, temperature=temperature, max_new_tokens=50) for i, p in enumerate(prompts)]
    assert len(requests) > 8, "some must wait for a slot"
    new = vllm_models.weights(folder, seed=7)
    responses = engines.interrupted(engine, requests, 100, lambda: engine.load_weights(new.items(), 1))
    mixed = 0
    for request, response in zip(requests, responses, strict=True):
        assert len(response.tokens) == len(response.logprobs) == len(response.versions) == 50
        assert sorted(response.versions.tolist()) == response.versions.tolist()
        mixed += len(set(response.versions.tolist())) == 2
        assert gap(vllm_models, folder, request, response, {0: None, 1: 7}) < 1e-4
        other = gap(vllm_models, folder, request, response, {1: None})
        assert not (response.versions == 1).any() or other > 1e-2, "the two policies must differ"
    assert mixed >= 8
    assert any((response.versions == 1).all() for response in responses)


def test_three_updates_within_one_completion(vllm_models, engines, make_request, prompts):
    folder = vllm_models.folder()
    engine = engines(folder)
    requests = [make_request(p, seed=i, max_new_tokens=120) for i, p in enumerate(prompts[:8])]

    def update() -> None:
        for version in (1, 2, 3):
            engine.load_weights(vllm_models.weights(folder, seed=version).items(), version)
            goal = engine.gauges()["tokens"] + 80
            engine.resume()
            while engine.gauges()["tokens"] < goal:
                time.sleep(0.0005)
            engine.pause()

    for request, response in zip(requests, engines.interrupted(engine, requests, 80, update), strict=True):
        assert set(response.versions.tolist()) == {0, 1, 2, 3}
        assert gap(vllm_models, folder, request, response, {0: None, 1: 1, 2: 2, 3: 3}) < 1e-4


def test_no_prefix_of_old_weights_is_used_after_a_load(vllm_models, engines, make_request):
    folder = vllm_models.folder()
    engine = engines(folder)
    request = make_request([3 + i % 12 for i in range(130)], max_new_tokens=8)
    engines.generate(engine, [request])
    before = engine.gauges()["prefilled_tokens"]
    engines.generate(engine, [request])
    assert engine.gauges()["prefilled_tokens"] - before < 32, "the prefix cache is in use"
    engine.pause()
    engine.load_weights(vllm_models.weights(folder, seed=7).items(), 1)
    engine.resume()
    before = engine.gauges()["prefilled_tokens"]
    response = engines.generate(engine, [request])[0]
    assert engine.gauges()["prefilled_tokens"] - before == 129
    assert gap(vllm_models, folder, request, response, {1: 7}) < 1e-4


def test_a_tensor_need_not_outlive_the_request_for_the_next(vllm_models, engines):
    folder = vllm_models.folder()
    engine = engines(folder)
    weights = vllm_models.weights(folder, seed=4)

    def reused() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(max(tensor.numel() for tensor in weights.values()))
        for name, tensor in weights.items():
            view = buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
            yield name, view
            buffer.fill_(float("nan"))

    engine.pause()
    engine.load_weights(reused(), 1)
    found = engine.logprobs([TOKENS])[0]
    engine.resume()
    assert np.abs(found - vllm_models.logprobs(folder, TOKENS, seed=4)).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "1 of .* tensors are missing: .'model.norm.weight'"),
        (lambda w: w.pop("lm_head.weight"), "1 of .* tensors are missing: .'lm_head.weight'"),
        (lambda w: w.update(strange=torch.zeros(3)), "'strange' is not in the model"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"'model.norm.weight' has shape \(3,\); allowed"),
        (lambda w: w.update({"lm_head.weight": w["lm_head.weight"] + 1}), "'lm_head.weight' is tied to"),
    ],
)
def test_wrong_weights_are_named_and_a_full_load_heals(vllm_models, engines, make_request, change, message):
    folder = vllm_models.folder()
    engine = engines(folder)
    wrong = vllm_models.weights(folder, seed=2)
    change(wrong)
    engine.pause()
    with pytest.raises(ValueError, match=message):
        engine.load_weights(wrong.items(), 1)
    engine.load_weights(vllm_models.weights(folder, seed=3).items(), 2)
    engine.resume()
    request = make_request([3, 4, 5, 6], max_new_tokens=20)
    response = engines.generate(engine, [request])[0]
    assert gap(vllm_models, folder, request, response, {2: 3}) < 1e-4
    assert response.versions.tolist() == [2] * 20


def test_a_weight_given_twice_is_named(vllm_models, engines):
    engine = engines()
    weights = list(vllm_models.weights(vllm_models.folder()).items())
    engine.pause()
    with pytest.raises(ValueError, match=r"'model\.embed_tokens\.weight' was given twice"):
        engine.load_weights([*weights[:4], weights[0]], 1)
    engine.load_weights(weights, 1)
    engine.resume()


@pytest.mark.parametrize("after", [0, 1, 9, 24])
def test_a_load_that_breaks_off_serves_nothing_until_a_full_one(vllm_models, engines, make_request, prompts, after):
    folder = vllm_models.folder()
    engine = engines(folder)
    weights = vllm_models.weights(folder, seed=5)
    requests = [make_request(p, seed=i, max_new_tokens=60) for i, p in enumerate(prompts)]

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for count, pair in enumerate(weights.items()):
            if count == after:
                raise ConnectionError("the sender is gone")
            yield pair

    def load() -> None:
        with pytest.raises(ConnectionError, match="the sender is gone"):
            engine.load_weights(broken(), 1)
        engine.resume()
        sampled = engine.gauges()["tokens"]
        time.sleep(0.1)
        assert engine.gauges()["tokens"] == sampled
        assert engine.gauges()["serving"] == 0
        assert engine.version == 0
        engine.pause(drain=True)  # what may not serve is not waited for
        engine.load_weights(weights.items(), 1)

    responses = engines.interrupted(engine, requests, 60, load)
    for request, response in zip(requests, responses, strict=True):
        assert gap(vllm_models, folder, request, response, {0: None, 1: 5}) < 1e-4
    assert engine.failure is None


def test_requests_wait_for_their_version(vllm_models, engines, make_request):
    folder = vllm_models.folder()
    engine = engines(folder)
    requests = [make_request([3, 4, 5], seed=i, min_version=i % 2, max_new_tokens=30) for i in range(6)]

    def load() -> None:
        assert engine.gauges()["waiting"] == 3
        engine.load_weights(vllm_models.weights(folder, seed=1).items(), 1)

    responses = engines.interrupted(engine, requests, 20, load)
    for request, response in zip(requests, responses, strict=True):
        assert response.versions.min() >= request.min_version


def test_a_load_waits_for_a_drain_and_new_requests_for_the_load(vllm_models, engines, make_request, prompts):
    folder = vllm_models.folder()
    engine = engines(folder)
    requests = [make_request(p, seed=i, max_new_tokens=150) for i, p in enumerate(prompts)]
    responses: list = []
    goal = engine.gauges()["tokens"] + 10
    running = threading.Thread(target=lambda: responses.extend(engines.generate(engine, requests)))
    running.start()
    while engine.gauges()["tokens"] < goal:
        time.sleep(0.0005)
    engine.pause(drain=True)
    assert engine.gauges()["running"] == 0
    assert engine.gauges()["waiting"] == len(prompts) - 8
    engine.load_weights(vllm_models.weights(folder, seed=1).items(), 1)
    engine.resume()
    running.join(60)
    versions = [set(response.versions.tolist()) for response in responses]
    assert versions.count({0}) == 8
    assert versions.count({1}) == len(prompts) - 8


def test_a_checkpoint_may_come_in_another_type(vllm_models, engines, tmp_path):
    folder = vllm_models.folder()
    engine = engines(folder)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in vllm_models.weights(folder).items()}
    engine.pause()
    engine.load_weights(weights.items(), 1)
    found = engine.logprobs([TOKENS])[0]
    engine.resume()
    wanted = vllm_models.logprobs(folder, TOKENS)
    assert 1e-6 < np.abs(found - wanted).max() < 0.2
    assert set(load_file(folder / "model.safetensors")) < set(weights)


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("moe", True)])
def test_every_weight_is_replaced(vllm_models, engines, kind, tied):
    folder = vllm_models.folder(kind, tie_word_embeddings=tied)
    engine = engines(folder)
    weights = vllm_models.weights(folder)
    changed = set()
    for version, name in enumerate(sorted(weights), start=1):
        other = {key: tensor.clone() for key, tensor in weights.items()}
        other[name] = other[name] * 1.5 + 0.05 * torch.randn(other[name].shape)
        if tied and name in ("lm_head.weight", "model.embed_tokens.weight"):
            other["lm_head.weight"] = other["model.embed_tokens.weight"] = other[name]
        engine.pause()
        engine.load_weights(other.items(), version)
        found = engine.logprobs([TOKENS])[0]
        engine.resume()
        with torch.inference_mode():
            ids = torch.tensor([TOKENS.tolist()])
            logits = vllm_models.forward(folder, other, ids).double()
        wanted = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        assert np.abs(found[1:] - wanted).max() < 1e-4, name
        changed.add(round(float(found.sum()), 6))
    assert len(changed) >= len(weights) - tied - 2
