"""KL estimators: values, bounds, and their expectation over a small vocabulary."""

from __future__ import annotations

import pytest
import torch

from pekoe.pipeline.algorithm.kl import kl_estimate, kl_reward

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
ALL = torch.ones(3)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_is_the_analytic_kl(kind):
    expected = (P * (P / Q).log()).sum()
    torch.testing.assert_close((P * kl_estimate(kind, P.log(), Q.log(), ALL)).sum(), expected)


def test_k2_is_half_the_square():
    torch.testing.assert_close(kl_estimate("k2", P.log(), Q.log(), ALL), (P / Q).log().square() / 2)


@pytest.mark.parametrize(("kind", "scale"), [("k1", 0.0), ("k2", 1.0), ("k3", None)])
def test_gradient_as_a_loss(kind, scale):
    """E[grad k2] is the gradient of KL(p ‖ q); that of k1 is 0, that of k3 is the gradient of KL(q ‖ p)."""
    logits = P.log().clone().requires_grad_()

    def gradient(value):
        return torch.autograd.grad(value, logits)[0]

    logp = torch.log_softmax(logits, 0)
    got = gradient((P * kl_estimate(kind, logp, Q.log(), ALL)).sum())
    logp = torch.log_softmax(logits, 0)
    forward = gradient((logp.exp() * (logp - Q.log())).sum())
    logp = torch.log_softmax(logits, 0)
    backward = gradient((Q * (Q.log() - logp)).sum())
    torch.testing.assert_close(got, backward if scale is None else scale * forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_far_ratios_and_masked_nan_stay_finite(kind, dtype):
    logprobs = torch.linspace(-200, 200, 401).to(dtype)
    logprobs[7] = torch.nan
    logprobs.requires_grad_()
    mask = torch.ones(401)
    mask[7] = 0
    value = kl_estimate(kind, logprobs, torch.zeros(401, dtype=dtype), mask)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logprobs.grad).all()
    assert value[7] == logprobs.grad[7] == 0
    if kind == "k3":
        assert logprobs.grad[0] < 0 < logprobs.grad[-1]


def test_as_a_reward_it_is_clamped():
    got = kl_reward("k3", torch.tensor([-100.0, 0.0]), torch.zeros(2), torch.ones(2))
    torch.testing.assert_close(got, torch.tensor([10.0, 0.0]))


def test_unknown_estimator():
    with pytest.raises(ValueError, match="'k4' is not allowed; one of k1, k2, k3"):
        kl_estimate("k4", P, Q, ALL)
