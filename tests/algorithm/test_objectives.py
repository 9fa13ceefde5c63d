"""Token losses of each objective against closed forms, and a user's own."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

from pekoe.pipeline.algorithm.objective import PolicyObjective
from pekoe.pipeline.algorithm.objectives.cispo import cispo
from pekoe.pipeline.algorithm.objectives.ppo import clipped_loss, ppo
from pekoe.pipeline.algorithm.objectives.sapo import sapo
from pekoe.pipeline.algorithm.policy_terms import PolicyTerms, TokenLoss
from pekoe.pipeline.config.actor import ActorConfig, RejectionConfig


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def terms(log_ratios, advantages, mask=None, logprobs=None, lengths=None, **settings):
    """Ratios against a proximal policy; both log-probs are leaves with gradients."""
    own = f64([-1.0] * len(log_ratios) if logprobs is None else logprobs).requires_grad_()
    prox = (own.detach() - f64(log_ratios)).requires_grad_()
    mask = torch.ones(len(own), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    lengths = torch.tensor(lengths or [len(own)])
    index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return PolicyTerms(own, prox, prox, f64(advantages), mask, index, len(lengths), ActorConfig(**settings), {})


def test_dual_clip_bounds_negative_advantages():
    found = clipped_loss(f64([5.0, 5.0, 1.0]), f64([-1.0, 1.0, -1.0]), 0.2, None, 3.0)
    assert found.values.tolist() == pytest.approx([3.0, -1.2, 1.0])
    assert found.stats["clipped_higher"].tolist() == [False, True, False]
    assert found.stats["clipped_lower"].tolist() == [False, False, False]
    assert found.stats["dual_clipped"].tolist() == [True, False, False]


def test_asymmetric_and_absent_clip():
    ratio, advantages = f64([1.25, 1.5, 0.5]), f64([1.0, 1.0, -1.0])
    asymmetric = clipped_loss(ratio, advantages, 0.2, 0.28, None)
    assert asymmetric.values.tolist() == pytest.approx([-1.25, -1.28, 0.8])
    assert asymmetric.stats["clipped_lower"].tolist() == [False, False, True]
    assert clipped_loss(ratio, advantages, None, None, None).values.tolist() == pytest.approx([-1.25, -1.5, 0.5])


def test_gspo_ratio_is_that_of_the_sequence():
    """Log-ratio .5 everywhere, whatever the length; the advantage is the sequence's mean."""
    found = ppo(terms([0.5] * 5, [1.0, 2, 4, 1, 1], lengths=[1, 4], importance_sampling_level="sequence", eps_clip=9.0))
    assert found.values.tolist() == pytest.approx([-math.exp(0.5), *[-2 * math.exp(0.5)] * 4])


def test_sapo_gate():
    at_one = terms([0.0, 0.0], [1.0, -1.0], use_decoupled_loss=False)
    found = sapo(at_one)
    assert found.values.tolist() == pytest.approx([-2.0, 2 / 1.05], rel=1e-14)
    (slope,) = torch.autograd.grad(found.values.sum(), at_one.logprobs)
    assert slope.tolist() == pytest.approx([-1.0, 1.0]), "the gate's slope at ratio 1 is 1, whatever tau"
    far = terms([1.0, 1.0], [3.0, -3.0], use_decoupled_loss=False, sapo_tau_pos=0.5, sapo_tau_neg=2.0)
    r = math.e

    def gate(tau):
        return 4 / tau / (1 + math.exp(-tau * (r - 1)))

    assert sapo(far).values.tolist() == pytest.approx([-3 * gate(0.5), 3 * gate(2.0)])
    assert sapo(far).stats == {}


def test_sapo_as_a_loss_is_against_the_behaviour_policy():
    batch = {
        "cu_seqlens": torch.tensor([0, 2]), "loss_mask": torch.tensor([0, 1]), "truncated": torch.tensor([0]),
        "logprobs": f64([0, -1.0]), "versions": torch.tensor([-1, 0]), "advantages": f64([0, 1.0]),
        "prox_logprobs": f64([0, -7.0]),
    }  # fmt: skip
    config = ActorConfig(objective="sapo", use_decoupled_loss=False, rejection_sampling=None)
    objective = PolicyObjective(config, num_active=1, num_sequences=1, max_new_tokens=1, version=0)
    loss, stats = objective(f64([0, -1.0]), None, batch)
    assert loss.item() == pytest.approx(-2)
    assert stats["clipped_lower"] == stats["clipped_higher"] == stats["dual_clipped"] == 0


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.2, 0.28)])
def test_cispo_numbers(low, high):
    log_ratios, logprobs = [-2, -0.5, 0, 0.3, 1.5, 0.1], [-1, -2, -0.3, -1.2, -0.7, -2.5]
    advantages = [1, -2, 0.5, 3, -1, 2]
    given = terms(log_ratios, advantages, [1, 1, 1, 1, 1, 0], logprobs, eps_clip=low, eps_clip_higher=high)
    found = cispo(given)
    loss = found.values[given.mask].mean()
    own, prox = torch.autograd.grad(loss, [given.logprobs, given.prox], allow_unused=True)
    weights = [min(max(math.exp(lr), 1 - low), 1 + high) for lr in log_ratios]
    slopes = [-w * a / 5 for w, a in zip(weights, advantages, strict=True)]
    assert loss.item() == pytest.approx(sum(s * p for s, p in zip(slopes[:5], logprobs, strict=False)))
    assert own.tolist() == pytest.approx([*slopes[:5], 0])
    assert prox is None, "nothing flows to the proximal policy"
    assert found.stats["clipped_higher"].tolist() == [math.exp(lr) > 1 + high for lr in log_ratios]
    assert found.stats["clipped_lower"].tolist() == [math.exp(lr) < 1 - low for lr in log_ratios]


def test_cispo_is_weighted_by_the_behaviour_policy_and_rejects():
    batch = {
        "cu_seqlens": torch.tensor([0, 3]), "loss_mask": torch.tensor([0, 1, 1]), "truncated": torch.tensor([0]),
        "logprobs": f64([0, -1.0, -9.0]), "versions": torch.tensor([-1, 0, 0]), "advantages": f64([0, 2.0, 1.0]),
        "prox_logprobs": f64([0, -1.2, -1.2]),
    }  # fmt: skip
    config = ActorConfig(objective="cispo", eps_clip=1.0, eps_clip_higher=4.0, rejection_sampling=RejectionConfig())
    objective = PolicyObjective(config, num_active=2, num_sequences=1, max_new_tokens=1, version=0)
    own = f64([0, -0.9, -1.2]).requires_grad_()
    loss, stats = objective(own, None, batch)
    loss.backward()
    weight = math.exp(0.3) * math.exp(-0.2)
    assert loss.item() == pytest.approx(weight * 2.0 * 0.9 / 2)
    assert own.grad.tolist() == pytest.approx([0, -weight * 2.0 / 2, 0])
    assert stats["rejected"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "cispo"}, r"actor\.eps_clip_higher: null is not allowed with objective cispo"),
        ({"objective": "sapo"}, r"actor\.use_decoupled_loss: true is not allowed with objective sapo"),
        ({"objective": "spo"}, r"actor\.objective: 'spo' is not known"),
        ({"objective": "math:no_such_loss"}, r"actor\.objective: cannot load"),
    ],
)
def test_objectives_say_what_they_need(settings, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective(ActorConfig(**settings), num_active=1, num_sequences=1, max_new_tokens=1, version=0)
    if settings["objective"] == "cispo":
        with pytest.raises(ValueError, match="needs it"):
            cispo(terms([0.0], [1.0]))
    if settings["objective"] == "sapo":
        with pytest.raises(ValueError, match="objective sapo"):
            sapo(terms([0.0], [1.0]))


def test_an_objective_of_the_user(monkeypatch):
    """One function; weights, aggregation and statistics are as for every other."""

    def reinforce(given: PolicyTerms) -> TokenLoss:
        return TokenLoss(-given.advantages * given.logprobs, {"rewarded": given.advantages > 0})

    module = types.ModuleType("users_objective")
    module.reinforce = reinforce
    monkeypatch.setitem(sys.modules, "users_objective", module)
    batch = {
        "cu_seqlens": torch.tensor([0, 3]), "loss_mask": torch.tensor([0, 1, 1]), "truncated": torch.tensor([0]),
        "logprobs": f64([0, -1.0, -1.0]), "versions": torch.tensor([-1, 0, 0]), "advantages": f64([0, 2.0, -1.0]),
        "prox_logprobs": f64([0, -1.0, -1.5]),
    }  # fmt: skip
    config = ActorConfig(objective="users_objective:reinforce")
    objective = PolicyObjective(config, num_active=2, num_sequences=1, max_new_tokens=1, version=0)
    own = f64([0, -0.5, -0.5]).requires_grad_()
    loss, stats = objective(own, None, batch)
    loss.backward()
    assert own.grad.tolist() == pytest.approx([0, -1.0, 0.5 * math.exp(-0.5)])
    assert stats["rewarded"] == 1
    assert stats["ratio"] == pytest.approx(math.exp(0.5) + math.e)
