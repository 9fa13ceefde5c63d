"""The one shift between logits and tokens, temperature, entropy, gradients."""

from __future__ import annotations

import pytest
import torch

from pekoe.kernels.logprob.logprob import logits_logprobs
from pekoe.pipeline.algorithm.token_logprobs import token_logprobs


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_equals_log_softmax_of_scaled_logits(temperature):
    torch.manual_seed(0)
    logits, targets = torch.randn(7, 11, dtype=torch.float64) * 3, torch.randint(0, 11, (7,))
    logprobs, entropy = logits_logprobs(logits, targets, temperature, chunk_rows=3)
    logp = torch.log_softmax(logits / temperature, -1)
    torch.testing.assert_close(logprobs, logp.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1))


def test_hand_values():
    logprobs, _ = logits_logprobs(torch.tensor([[2.0, 1, 0]], dtype=torch.float64), torch.tensor([1]), 0.6)
    scaled = torch.tensor([2.0, 1, 0], dtype=torch.float64) / 0.6
    torch.testing.assert_close(logprobs[0], scaled[1] - torch.log(torch.exp(scaled).sum()))


def test_gradients_in_float64():
    torch.manual_seed(0)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 6, (5,))
    assert torch.autograd.gradcheck(lambda x: logits_logprobs(x, targets, 0.7, chunk_rows=2), (logits,))
    assert torch.autograd.gradcheck(lambda x: logits_logprobs(x, targets)[1], (logits,))


def test_without_entropy_only_logprobs_are_made():
    torch.manual_seed(0)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 6, (5,))
    logprobs, entropy = logits_logprobs(logits, targets, with_entropy=False)
    torch.testing.assert_close(logprobs, logits_logprobs(logits, targets)[0])
    assert not entropy.any()
    assert not entropy.requires_grad


def test_both_gradients_together():
    torch.manual_seed(0)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    targets, weight = torch.randint(0, 6, (5,)), torch.randn(5, dtype=torch.float64)

    def mixed(x):
        logprobs, entropy = logits_logprobs(x, targets, 1.7, chunk_rows=2)
        return logprobs * weight + entropy * weight.flip(0)

    assert torch.autograd.gradcheck(mixed, (logits,))


def test_infinite_logit_gives_no_nan():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    logprobs, entropy = logits_logprobs(logits, torch.tensor([0]))
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(logits.grad).all()


def test_bfloat16_logits_give_float32_and_a_bfloat16_gradient():
    logits = torch.randn(4, 8).bfloat16().requires_grad_()
    logprobs, _ = logits_logprobs(logits, torch.tensor([0, 1, 2, 3]))
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16


def test_alignment_with_a_model_whose_logprob_tells_the_token():
    """A model that puts a log-prob of -id/100, up to a constant, on each id."""
    tokens = torch.tensor([10, 11, 12, 13, 20, 21, 30])
    cu_seqlens, mask = torch.tensor([0, 4, 6, 7]), torch.tensor([0, 0, 1, 0, 0, 1, 0])
    asked = []

    def logprobs_at(positions, targets):
        asked.append((positions.tolist(), targets.tolist()))
        row = -torch.arange(40, dtype=torch.float64) / 100
        return logits_logprobs(row.expand(len(positions), -1), targets)

    logprobs, entropy = token_logprobs(logprobs_at, tokens, cu_seqlens, mask)
    lse = torch.logsumexp(-torch.arange(40, dtype=torch.float64) / 100, 0)
    expected = torch.tensor([0, 0, -0.12 - lse, 0, 0, -0.21 - lse, 0], dtype=torch.float64)
    torch.testing.assert_close(logprobs, expected)
    assert asked == [([1, 4], [12, 21])]
    assert entropy.nonzero().flatten().tolist() == [2, 5]


def test_mask_on_a_first_token_is_refused():
    with pytest.raises(ValueError, match="first token"):
        token_logprobs(lambda *_: (torch.zeros(1), torch.zeros(1)), torch.zeros(3).long(), torch.tensor([0, 2, 3]),
                       torch.tensor([0, 0, 1]))  # fmt: skip


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        logits_logprobs(torch.zeros(1, 2), torch.tensor([0]), 0.0)
