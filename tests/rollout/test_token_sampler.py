"""Sampling from logits: frequencies, top-k, top-p, greedy, bans, edges of the uniform number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pekoe.pipeline.rollout.engine import SamplingParameters
from pekoe.pipeline.rollout.engines.sequence_state import UniformStream
from pekoe.pipeline.rollout.engines.token_sampler import TokenSampler, keep_likeliest

CPU = torch.device("cpu")


def draw(logits, uniforms, forbidden=(), **fields):
    rows = len(uniforms)
    sampler = TokenSampler([SamplingParameters(**fields)] * rows, CPU, len(logits))
    return sampler.sample(torch.tensor(logits).expand(rows, -1), uniforms, forbidden)


def test_frequencies_follow_the_temperature():
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]
    stream = UniformStream(7)
    tokens, logprobs = draw(logits, [stream() for _ in range(40000)], temperature=0.7)
    wanted = torch.log_softmax(torch.tensor(logits) / 0.7, -1)
    frequency = np.bincount(tokens.numpy(), minlength=5) / 40000
    assert np.abs(frequency - wanted.exp().numpy()).max() < 0.01
    torch.testing.assert_close(logprobs, wanted[tokens])


def test_edges_of_the_uniform_number_never_give_an_impossible_token():
    largest = float(np.nextafter(np.float32(1), np.float32(0)))
    logits = [-float("inf"), 1.0, -200.0, 0.0, -float("inf"), -float("inf")]
    tokens, _ = draw(logits, [0.0, largest, 1.0])
    assert tokens.tolist() == [1, 3, 3]
    tokens, _ = draw([3.0, 2.0, 1.0, 0.0], [0.0, largest], [(0, 0), (1, 3)])
    assert tokens.tolist() == [1, 2]


def test_top_k_then_top_p():
    weights = torch.tensor([[0.1, 0.4, 0.3, 0.2]])

    def kept(k, p):
        return keep_likeliest(weights, torch.tensor([[k]]), torch.tensor([[p]]))[0].nonzero()[:, 0].tolist()

    assert kept(2, 2.0) == [1, 2]
    assert kept(100, 0.4) == [1]
    assert kept(100, 0.41) == [1, 2]
    assert kept(100, 0.95) == [0, 1, 2, 3]
    assert kept(2, 0.5) == [1]
    assert kept(2, 0.6) == [1, 2]
    assert kept(100, 1e-9) == [1]


def test_rows_with_different_parameters_do_not_disturb_each_other():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    rows = [
        SamplingParameters(),
        SamplingParameters(greedy=True, temperature=0.5),
        SamplingParameters(top_k=3),
        None,
        SamplingParameters(top_p=0.5, temperature=2.0),
        SamplingParameters(temperature=0.3),
    ]
    uniforms = [0.3, 0.9, 0.99, 0.0, 0.999, 0.5]
    tokens, logprobs = TokenSampler(rows, CPU, 50).sample(logits, uniforms)
    for i, row in enumerate(rows):
        if row is not None:
            one_token, one_logprob = TokenSampler([row], CPU, 50).sample(logits[i : i + 1], uniforms[i : i + 1])
            assert tokens[i] == one_token[0]
            assert logprobs[i] == one_logprob[0]
            assert logprobs[i] == pytest.approx(torch.log_softmax(logits[i] / row.temperature, -1)[tokens[i]].item())
    assert tokens[1] == logits[1].argmax()
    assert tokens[2] in logits[2].topk(3).indices


def test_half_precision_logits_are_computed_in_float32():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    _, logprobs = TokenSampler([SamplingParameters(greedy=True)], CPU, 3).sample(logits, [0.0])
    assert logprobs.dtype == torch.float32
    assert logprobs.item() == pytest.approx(torch.log_softmax(logits.float(), -1)[0, 2].item())


def test_uniform_stream_is_a_function_of_the_seed():
    first, second, other = UniformStream(3), UniformStream(3), UniformStream(4)
    numbers = [first() for _ in range(200)]
    assert numbers == [second() for _ in range(200)]
    assert numbers != [other() for _ in range(200)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 200


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_cut_distribution_in_closed_form(kind):
    """Logits [2, 1, 0] at 0.6: the first two hold 97 %, so a mass of 0.9 leaves these; log-probs stay the full ones."""
    weights = np.exp(np.array([2.0, 1.0, 0.0]) / 0.6)
    full = weights / weights.sum()
    stream = UniformStream(3)
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=kind).expand(20000, -1)
    sampler = TokenSampler([SamplingParameters(temperature=0.6, top_p=0.9)] * 20000, CPU, 3)
    tokens, logprobs = sampler.sample(logits, [stream() for _ in range(20000)])
    assert logprobs.dtype == kind
    np.testing.assert_allclose(logprobs.numpy(), np.log(full)[tokens.numpy()], rtol=1e-6)
    share = np.bincount(tokens.numpy(), minlength=3) / 20000
    np.testing.assert_allclose(share, [full[0] / full[:2].sum(), full[1] / full[:2].sum(), 0], atol=0.01)


def test_bias_and_penalty_come_before_the_temperature_and_leave_logprobs_alone():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    rows = [
        SamplingParameters(temperature=0.6, frequency_penalty=0.5, logit_bias=((2, 1.5),)),
        SamplingParameters(temperature=2.0, logit_bias=((0, -100.0),)),
    ]
    full = torch.log_softmax(logits / torch.tensor([[0.6], [2.0]]), -1)
    changed = torch.softmax(torch.tensor([2.0 - 2 * 0.5, 1.0 - 0.5, 1.5], dtype=torch.float64) / 0.6, -1)
    edges = changed.cumsum(-1)
    for uniform, token in ((0.0, 0), (edges[0] - 1e-6, 0), (edges[0] + 1e-6, 1), (edges[1] + 1e-6, 2)):
        sampler = TokenSampler(rows, CPU, 3, [[0, 1, 0], []])
        tokens, logprobs = sampler.sample(logits, [float(uniform), 0.0])
        assert tokens.tolist() == [token, 1]
        torch.testing.assert_close(logprobs, full.gather(1, tokens[:, None])[:, 0])


def test_the_penalty_grows_with_what_is_sampled():
    rows = [SamplingParameters(greedy=True, frequency_penalty=0.4), SamplingParameters(greedy=True)]
    sampler = TokenSampler(rows, CPU, 3)
    logits = torch.tensor([[1.0, 0.5, -9.0], [1.0, 0.5, -9.0]])
    drawn = [sampler.sample(logits, [0.0, 0.0])[0].tolist() for _ in range(6)]
    assert [first for first, _ in drawn] == [0, 0, 1, 0, 1, 0]
    assert {second for _, second in drawn} == {0}
    half = TokenSampler(rows, CPU, 3, [[0, 0, 1], []])
    assert [half.sample(logits, [0.0, 0.0])[0].tolist()[0] for _ in range(3)] == [0, 1, 0]
