"""Sampling parameters and ends: one suite, the hf engine and the vllm engine alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from pekoe.pipeline.records import Finish
from pekoe.pipeline.rollout.engine import Instance
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine

pytestmark = pytest.mark.vllm

END = 1


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine(request, engines) -> Iterator[Any]:
    if request.param == "vllm":
        yield engines()
        return
    made = HfEngine.build(engines.settings(), Instance())
    yield made
    made.close()


@pytest.fixture
def sample(engine, engines, make_request):
    """`sample(prompt, count=…, **parameters)`: that many completions, seeds 0, 1, …"""

    def run(prompt, count: int = 1, **fields):
        return engines.generate(engine, [make_request(prompt, seed=i, **fields) for i in range(count)])

    return run


@pytest.fixture
def text(engines):
    """As the engines decode: characters, and a space between tokens."""
    tokenizer = AutoTokenizer.from_pretrained(engines.settings().tokenizer_path)
    return lambda tokens: tokenizer.decode(tokens.tolist())


def check_lengths(responses) -> None:
    for response in responses:
        assert len(response.tokens) == len(response.logprobs) == len(response.versions)
        assert np.isfinite(response.logprobs).all()


def test_the_models_end_token_ends_once_and_is_kept(sample):
    responses = sample([3, 4, 5], 60, ignore_eos=False, max_new_tokens=40)
    check_lengths(responses)
    stopped = [response for response in responses if response.finish == Finish.STOP]
    assert stopped
    for response in responses:
        assert Counter(response.tokens.tolist())[END] == (response.finish == Finish.STOP)
        assert response.finish == Finish.STOP or len(response.tokens) == 40
    for response in stopped:
        assert response.tokens[-1] == END


def test_ignored_end_tokens_do_not_end_but_stop_tokens_do(sample):
    responses = sample([3, 4, 5], 40, stop_token_ids=(7, 9), max_new_tokens=60)
    check_lengths(responses)
    assert any(END in response.tokens for response in responses)
    for response in responses:
        assert not {7, 9} & set(response.tokens[:-1].tolist())
        assert (response.finish == Finish.STOP) == (response.tokens[-1] in (7, 9))


def test_nothing_ends_before_the_least_number_of_tokens(sample):
    responses = sample([3, 4, 5], 30, ignore_eos=False, stop_token_ids=(7, 9), min_new_tokens=25, max_new_tokens=40)
    check_lengths(responses)
    for response in responses:
        assert len(response.tokens) >= 25
        assert not {END, 7, 9} & set(response.tokens[:25].tolist())


@pytest.mark.parametrize("strings", [("5",), ("1 2", "3 4"), (" 7", "= -")])
def test_a_stop_string_ends_with_the_token_that_completes_it(sample, text, strings):
    responses = sample([3, 4, 5], 30, stop=strings, max_new_tokens=80)
    check_lengths(responses)
    assert any(response.finish == Finish.STOP for response in responses)
    for response in responses:
        found = text(response.tokens)
        before = text(response.tokens[:-1])
        assert not any(string in before for string in strings)
        assert (response.finish == Finish.STOP) == any(string in found for string in strings)


def test_stop_strings_and_least_tokens(sample, text):
    for response in sample([3, 4, 5], 30, stop=("5", "8"), min_new_tokens=12, max_new_tokens=60):
        assert len(response.tokens) >= 12
        if response.finish == Finish.STOP:
            assert text(response.tokens)[-1] in "58"


@pytest.mark.parametrize(("prompt", "wanted"), [(200, 56), (255, 1), (256, 0), (300, 0)])
def test_a_completion_is_cut_at_the_context(sample, engine, prompt, wanted):
    steps = engine.gauges()["steps"]
    response = sample([3 + i % 12 for i in range(prompt)], max_new_tokens=100)[0]
    assert len(response.tokens) == len(response.logprobs) == len(response.versions) == wanted
    assert response.finish == Finish.LENGTH
    assert (engine.gauges()["steps"] > steps) == (wanted > 0)


def test_no_tokens_asked_for_give_an_empty_answer(sample, engine):
    steps = engine.gauges()["steps"]
    response = sample([3, 4], max_new_tokens=0)[0]
    assert len(response.tokens) == 0
    assert response.finish == Finish.LENGTH
    assert engine.gauges()["steps"] == steps


def test_a_seed_gives_one_completion_and_another_seed_another(sample):
    first, second = sample([3, 4, 5], 20, max_new_tokens=30), sample([3, 4, 5], 20, max_new_tokens=30)
    assert [r.tokens.tolist() for r in first] == [r.tokens.tolist() for r in second]
    assert len({tuple(response.tokens) for response in first}) == 20


def test_top_k_and_top_p_only_take_what_they_leave(sample, vllm_models):
    folder = vllm_models.folder()
    ids = torch.tensor([[3, 4, 5]])
    logits = vllm_models.forward(folder, vllm_models.weights(folder), ids)[-1]
    order = logits.argsort(descending=True).tolist()
    found = {int(response.tokens[0]) for response in sample([3, 4, 5], 100, top_k=3, max_new_tokens=1)}
    assert found == set(order[:3]) or found < set(order[:3])
    shares = (logits / 2).softmax(-1).sort(descending=True).values.cumsum(-1)
    kept = order[: int((shares < 0.7).sum()) + 1]
    found = {int(r.tokens[0]) for r in sample([3, 4, 5], 100, top_p=0.7, temperature=2.0, max_new_tokens=1)}
    assert found <= set(kept)
    assert len(found) > 1


def test_frequencies_follow_the_temperature(sample, vllm_models):
    folder = vllm_models.folder()
    logits = vllm_models.forward(folder, vllm_models.weights(folder), torch.tensor([[3, 4, 5]]))[-1]
    for temperature in (0.7, 2.0):
        responses = sample([3, 4, 5], 400, temperature=temperature, max_new_tokens=1)
        counts = Counter(int(response.tokens[0]) for response in responses)
        for token, share in enumerate((logits / temperature).softmax(-1).tolist()):
            assert abs(counts[token] / 400 - share) < 5 * math.sqrt(share * (1 - share) / 400) + 1e-3


def test_bias_and_penalty_change_what_is_drawn(sample):
    responses = sample([3, 4, 5], 10, logit_bias=((8, 100.0),), max_new_tokens=20)
    assert all(response.tokens.tolist() == [8] * 20 for response in responses)
    check_lengths(responses)
    responses = sample([3, 4, 5], 20, logit_bias=((8, -100.0), (9, -100.0)), max_new_tokens=30)
    assert not any({8, 9} & set(response.tokens.tolist()) for response in responses)
    often = [max(Counter(r.tokens.tolist()).values()) for r in sample([3, 4], 10, greedy=True, max_new_tokens=60)]
    seldom = [
        max(Counter(r.tokens.tolist()).values())
        for r in sample([3, 4], 10, greedy=True, frequency_penalty=2.0, max_new_tokens=60)
    ]
    assert max(seldom) < min(often)
