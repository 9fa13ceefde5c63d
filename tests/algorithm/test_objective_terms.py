"""What is added to the policy loss or taken from it: KL to a reference, distillation, M2PO's mask."""

from __future__ import annotations

import math

import pytest
import torch

from pekoe.pipeline.algorithm.objective import PolicyObjective, distillation_loss
from pekoe.pipeline.algorithm.policy_terms import PolicyTerms
from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.config.companions import TeacherConfig


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def batch_of(lengths=(4,), mask=(0, 1, 1, 0), advantages=None, **extra):
    n = sum(lengths)
    return {
        "cu_seqlens": torch.tensor([0, *torch.cumsum(torch.tensor(lengths), 0).tolist()]),
        "loss_mask": torch.tensor(mask),
        "truncated": torch.zeros(len(lengths), dtype=torch.uint8),
        "logprobs": torch.where(torch.tensor(mask) > 0, f64([-1.0] * n), 0),
        "versions": torch.where(torch.tensor(mask) > 0, 0, -1),
        "advantages": f64([0.0] * n if advantages is None else advantages),
        **{name: f64(values) for name, values in extra.items()},
    }


def run(batch, current, teacher=None, num_active=2, num_sequences=1, **settings):
    """(loss, gradient, statistics)."""
    objective = PolicyObjective(
        ActorConfig(**settings), num_active=num_active, num_sequences=num_sequences, max_new_tokens=5, version=0,
        teacher=teacher,
    )  # fmt: skip
    own = f64(current).requires_grad_()
    loss, stats = objective(own, None, batch)
    (gradient,) = torch.autograd.grad(loss, own)
    return loss.item(), gradient.tolist(), {name: value.item() for name, value in stats.items()}


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k2", lambda lr: lr * lr / 2, lambda lr: lr),
        ("k3", lambda lr: math.exp(-lr) - 1 + lr, lambda lr: 1 - math.exp(-lr)),
    ],
)
def test_kl_in_the_loss(kind, value, slope):
    batch = batch_of(ref_logprobs=[math.nan, -1.5, -0.2, math.nan])
    loss, gradient, stats = run(batch, [9, -1.0, -1.0, 9], kl_loss_coef=0.1, kl_loss_estimator=kind)
    assert loss == pytest.approx(0.1 * (value(0.5) + value(-0.8)) / 2)
    assert gradient == pytest.approx([0, 0.05 * slope(0.5), 0.05 * slope(-0.8), 0])
    assert stats["kl_ref"] == pytest.approx(math.exp(-0.5) - 1 + 0.5 + math.exp(0.8) - 1 - 0.8)


@pytest.mark.parametrize(("how", "expected"), [("token_mean", 0.5 / 3), ("sequence_mean", 0.25), ("constant", 0.05)])
def test_kl_in_the_loss_is_aggregated_as_the_policy_loss(how, expected):
    """k2 of log-ratio 1 on the one token of the first sequence, 0 on the two of the second."""
    batch = batch_of((2, 3), (0, 1, 0, 1, 1), ref_logprobs=[0, -2.0, 0, -1.0, -1.0])
    options = {"kl_loss_coef": 1.0, "kl_loss_estimator": "k2", "loss_aggregation": how}
    loss, *_ = run(batch, [0, -1.0, 0, -1.0, -1.0], num_active=3, num_sequences=2, **options)
    assert loss == pytest.approx(expected)


def test_kl_in_the_loss_needs_a_reference_and_an_estimator_with_a_signal():
    with pytest.raises(ValueError, match="ref_logprobs is missing"):
        run(batch_of(), [0, -1.0, -1.0, 0], kl_loss_coef=0.1)
    with pytest.raises(ValueError, match=r"actor\.kl_loss_estimator: 'k1' is not allowed; k2 or k3"):
        run(batch_of(), [0, -1.0, -1.0, 0], kl_loss_coef=0.1, kl_loss_estimator="k1")
    assert "kl_ref" not in run(batch_of(), [0, -1.0, -1.0, 0])[2]


def test_m2_mask_leaves_the_numerator_only():
    batch = batch_of(advantages=[0, 1.0, 5.0, 0])
    batch["m2_keep"] = torch.tensor([0, 1, 0, 0], dtype=torch.uint8)
    batch["prox_logprobs"] = f64([0, -1.0, -1.0, 0])
    loss, gradient, stats = run(batch, [0, -1.0, -1.0, 0], m2_threshold=0.04, eps_clip=None)
    assert loss == pytest.approx(-0.5)
    assert gradient == pytest.approx([0, -0.5, 0, 0])
    assert (stats["m2_dropped"], stats["rejected"], stats["tokens"]) == (1, 0, 2)


TEACHER = [0.0, -1.4, -0.3, 0.0]


def test_distillation_alone():
    """w_d sum exp(logpi - logpi_b) sg(logpi - logpi_teacher) / N; no advantage is read."""
    batch = batch_of(teacher_logprobs=[math.nan, -1.4, -0.3, math.nan])
    del batch["advantages"]
    teacher = TeacherConfig(rl_loss_weight=0.0, distill_loss_weight=0.5)
    loss, gradient, stats = run(batch, [0, -0.9, -1.2, 0], teacher, entropy_coef=0.3)
    first, second = math.exp(0.1) * 0.5, math.exp(-0.2) * -0.9
    assert loss == pytest.approx(0.5 * (first + second) / 2)
    assert gradient == pytest.approx([0, 0.25 * first, 0.25 * second, 0])
    assert stats["teacher_kl"] == pytest.approx(0.5 - 0.9)


def test_distillation_beside_rewards():
    batch = batch_of(advantages=[0, 1.0, -1.0, 0], teacher_logprobs=TEACHER)
    current = [0, -0.9, -1.2, 0]
    plain, slope, _ = run(batch, current)
    alone, distilled, _ = run(batch, current, TeacherConfig(rl_loss_weight=0.0, distill_loss_weight=1.0))
    loss, gradient, _ = run(batch, current, TeacherConfig(rl_loss_weight=0.3, distill_loss_weight=2.0))
    assert loss == pytest.approx(0.3 * plain + 2 * alone)
    assert gradient == pytest.approx([0.3 * a + 2 * b for a, b in zip(slope, distilled, strict=True)])


def test_a_micro_batch_without_tokens_may_lack_the_teacher():
    teacher = TeacherConfig()
    empty = run(batch_of((), ()), [], teacher)
    assert empty[0] == 0
    assert empty[2].keys() == run(batch_of(teacher_logprobs=TEACHER), [0, -1.0, -1.0, 0], teacher)[2].keys()
    with pytest.raises(ValueError, match="teacher_logprobs is missing"):
        run(batch_of(), [0, -1.0, -1.0, 0], teacher)


def distilled_gradient(logits, sampler, teacher):
    """Expected gradient over every token of the vocabulary, drawn from `sampler`."""
    total = torch.zeros_like(logits)
    for token in range(len(logits)):
        own = torch.log_softmax(logits, -1)[token : token + 1]
        behaviour = sampler[token : token + 1].log()
        mask, index = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
        terms = PolicyTerms(own, behaviour, behaviour, f64([0.0]), mask, index, 1, ActorConfig(), {})
        (slope,) = torch.autograd.grad(distillation_loss(terms, teacher[token : token + 1].log()).sum(), logits)
        total += sampler[token] * slope
    return total


@pytest.mark.parametrize("seed", range(3))
def test_expected_gradient_is_that_of_the_analytic_reverse_kl(seed):
    """Whatever policy has sampled, as long as it gives each token a chance."""
    torch.manual_seed(seed)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    sampler, teacher = (torch.softmax(torch.randn(5, dtype=torch.float64), -1) for _ in range(2))
    logp = torch.log_softmax(logits, -1)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - teacher.log())).sum(), logits)
    own = torch.softmax(logits.detach(), -1)
    torch.testing.assert_close(distilled_gradient(logits, own, teacher), expected, atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(distilled_gradient(logits, sampler, teacher), expected, atol=1e-14, rtol=1e-12)
    assert expected.abs().max() > 0.01


def test_far_log_ratios_stay_finite_in_bfloat16():
    for gap in (-200.0, 200.0):
        own = torch.tensor([gap], dtype=torch.bfloat16, requires_grad=True)
        zero = torch.zeros(1, dtype=torch.bfloat16)
        mask, index = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
        terms = PolicyTerms(own, zero, zero, zero, mask, index, 1, ActorConfig(), {})
        loss = distillation_loss(terms, zero - 1).sum()
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(own.grad).all()
