"""Log-probs of given logits: values, gradients, temperature, chunks, impossible tokens."""

from __future__ import annotations

import pytest
import torch

from pekoe.kernels.logprob.logprob import logits_logprobs
from pekoe.kernels.logprob.reference import logprobs_and_entropy


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


@pytest.mark.parametrize("rows", [0, -1])
def test_chunks_without_rows_are_refused(rows):
    with pytest.raises(ValueError, match=rf"chunk_rows: {rows} is not allowed; at least 1"):
        logits_logprobs(torch.zeros(2, 3), torch.tensor([0, 2]), chunk_rows=rows)


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        logits_logprobs(torch.zeros(1, 2), torch.tensor([0]), 0.0)


@pytest.mark.parametrize("implementation", ["native", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_against_float64(monkeypatch, implementation, dtype):
    monkeypatch.setenv("PEKOE_KERNELS", f"logprob={implementation}")
    torch.manual_seed(0)
    logits = (torch.randn(37, 1531) * 4).to(dtype).T.contiguous().T.requires_grad_()
    targets, g, h = torch.randint(0, 1531, (37,)), torch.randn(37), torch.randn(37)
    logprobs, entropy = logits_logprobs(logits, targets, 0.8)
    (logprobs @ g + entropy @ h).backward()
    exact = logits.detach().double().requires_grad_()
    expected = logprobs_and_entropy(exact, targets, 0.8)
    (expected[0] @ g.double() + expected[1] @ h.double()).backward()
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=2e-6, atol=2e-6)
    error = (logits.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < (1e-6 if dtype == torch.float32 else 3e-3)


def test_chunks_do_not_change_a_bit():
    torch.manual_seed(0)
    logits, targets = torch.randn(9, 1100, requires_grad=True), torch.randint(0, 1100, (9,))
    found = []
    for rows in (1, 4, 9):
        logprobs, entropy = logits_logprobs(logits, targets, 0.9, chunk_rows=rows)
        found.append((logprobs, entropy, *torch.autograd.grad((logprobs * 2 - entropy).sum(), logits)))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("implementation", ["native", "torch", "reference"])
def test_impossible_tokens_have_exactly_no_gradient_and_nan_stays_nan(monkeypatch, implementation):
    monkeypatch.setenv("PEKOE_KERNELS", f"logprob={implementation}")
    logits = torch.randn(3, 700)
    logits[0, 100:] = -torch.inf
    logits[1, 1:] = -torch.inf
    logits[2, 699] = torch.nan
    logits.requires_grad_()
    logprobs, entropy = logits_logprobs(logits, torch.tensor([5, 0, 0]))
    (logprobs + 1e6 * entropy)[:2].sum().backward()
    assert logits.grad[0, 100:].eq(0).all()
    assert logits.grad[1].eq(0).all()
    assert (logprobs[1].item(), entropy[1].item()) == (0, 0)
    assert logprobs[2].isnan()
    assert entropy[2].isnan()


def test_huge_logits_keep_their_differences():
    logits = torch.tensor([[1e30, 1e30, -1e30], [3e4, 3e4 - 1, -3e38]])
    logprobs, entropy = logits_logprobs(logits, torch.tensor([0, 1]))
    expected = logprobs_and_entropy(logits.double(), torch.tensor([0, 1]), 1.0)
    torch.testing.assert_close(logprobs.double(), expected[0])
    torch.testing.assert_close(entropy.double(), expected[1])
