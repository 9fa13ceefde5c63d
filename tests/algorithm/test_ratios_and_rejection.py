"""Importance ratios, the behaviour weight and its bounds, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from pekoe.pipeline.algorithm.policy_terms import PolicyTerms
from pekoe.pipeline.algorithm.ratios import loglinear_logprobs, policy_ratio
from pekoe.pipeline.algorithm.rejection import behaviour_weights, binary_kl
from pekoe.pipeline.config.actor import ActorConfig, RejectionConfig


def weights(log_ratios, config, mask=None, lengths=None, dtype=torch.float64):
    lr = torch.tensor(log_ratios, dtype=dtype)
    mask = torch.ones(len(lr), dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    lengths = torch.tensor(lengths or [len(lr)])
    index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    behaviour = torch.full_like(lr, -20.0)
    weight, keep = behaviour_weights(behaviour + lr, behaviour, mask, index, len(lengths), config)
    return weight.tolist(), keep.tolist()


def terms(logprobs, advantages, mask, index, num_sequences, level):
    """Against a proximal policy of log-probs 0."""
    zeros, config = torch.zeros_like(logprobs), ActorConfig(importance_sampling_level=level)
    return PolicyTerms(logprobs, zeros, zeros, advantages, mask, index, num_sequences, config, {})


def test_no_bounds():
    weight, keep = weights([0, 3, -2], None)
    assert weight == pytest.approx([1, math.exp(3), math.exp(-2)])
    assert keep == [True, True, True]


def test_token_ratio_mask():
    weight, keep = weights([0, 1, 0], RejectionConfig(upper=2))
    assert keep == [True, False, True]
    assert weight == pytest.approx([1, math.e, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_are_inclusive(dtype):
    assert weights([math.log(2)], RejectionConfig(upper=2), dtype=dtype)[1] == [True]
    assert weights([math.log(0.5)], RejectionConfig(upper=2, lower=0.5), dtype=dtype)[1] == [True]
    assert weights([0.694, -0.694], RejectionConfig(upper=2, lower=0.5), dtype=dtype)[1] == [False, False]


def test_sequence_k2_keeps_token_weights():
    config = RejectionConfig(level="sequence", metric="kl_k2", upper=0.5)
    weight, keep = weights([0, 1, 0], config)
    assert keep == [True, True, True]
    assert weight == pytest.approx([1, math.e, 1])
    assert weights([0, 1, 0], RejectionConfig(level="sequence", metric="kl_k2", upper=0.16))[1] == [False] * 3


def test_token_clamp():
    weight, keep = weights([2, 0], RejectionConfig(action="clamp", upper=5))
    assert weight == pytest.approx([5, 1])
    assert keep == [True, True]


def test_sequence_ratio_aggregates_in_log_space():
    config = RejectionConfig(level="sequence", upper=5)
    assert weights([0, 0.5, 1], config)[0] == pytest.approx([math.exp(0.5)] * 3)
    clamp = RejectionConfig(level="sequence", action="clamp", upper=3)
    assert weights([0, 4, 0], clamp)[0] == pytest.approx([3, 3, 3])


@pytest.mark.parametrize(("agg", "kept"), [("mean", True), ("sum", False), ("max", False)])
def test_sequence_aggregates(agg, kept):
    config = RejectionConfig(level="sequence", agg=agg, upper=math.exp(1.2))
    weight, keep = weights([0, 2, 1], config)
    assert keep == [kept] * 3
    assert weight == pytest.approx([math.e] * 3)


def test_masked_tokens_and_other_sequences_do_not_vote():
    config = RejectionConfig(level="sequence", upper=2)
    weight, keep = weights([0, 9, 0, 5, 5], config, mask=[1, 0, 1, 1, 1], lengths=[3, 2])
    assert keep == [True, False, True, False, False]
    assert weight[0] == weight[2] == 1
    empty = RejectionConfig(level="sequence", agg="max", upper=2)
    assert weights([0, 1], empty, mask=[0, 0])[1] == [False, False]


def test_binary_kl_is_the_larger_direction():
    p, q = 0.3, 0.6

    def kl(a, b):
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    got = binary_kl(torch.tensor([math.log(p)]), torch.tensor([math.log(q)]))
    assert float(got) == pytest.approx(max(kl(p, q), kl(q, p)), rel=1e-5)


def test_binary_kl_rejects_certain_against_impossible():
    config = RejectionConfig(metric="binary_kl", upper=2)
    prox, behaviour = torch.tensor([0.0, -1.0, -0.5]), torch.tensor([-30.0, -1.0, -0.7])
    mask, index = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    _, keep = behaviour_weights(prox, behaviour, mask, index, 1, config)
    assert keep.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RejectionConfig(action="clamp", metric="kl_k1"), "'kl_k1' is not allowed with action clamp"),
        (RejectionConfig(upper=None), "both null"),
        (RejectionConfig(upper=1, lower=2), "2 is above upper 1"),
    ],
)
def test_meaningless_settings(config, message):
    with pytest.raises(ValueError, match=message):
        weights([0.0], config)


def test_gspo_ratio_does_not_depend_on_length():
    lr, mask = torch.full((5,), 0.1, dtype=torch.float64), torch.tensor([1, 1, 1, 1, 1]).bool()
    index = torch.tensor([0, 1, 1, 1, 1])
    ratio, _ = policy_ratio(terms(lr, torch.ones(5), mask, index, 2, "sequence"))
    torch.testing.assert_close(ratio, torch.full((5,), math.exp(0.1), dtype=torch.float64))


def test_gspo_takes_means_over_active_tokens():
    lr = torch.tensor([0.2, 7.0, 0.4], dtype=torch.float64)
    advantages = torch.tensor([1.0, 50, 3], dtype=torch.float64)
    mask, index = torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.int64)
    ratio, mean = policy_ratio(terms(lr, advantages, mask, index, 1, "sequence"))
    assert ratio.tolist() == pytest.approx([math.exp(0.3)] * 3)
    assert mean.tolist() == [2, 2, 2]


def test_unknown_level():
    with pytest.raises(ValueError, match="importance_sampling_level: 'word'"):
        policy_ratio(terms(torch.zeros(1), torch.zeros(1), torch.ones(1).bool(), torch.zeros(1).long(), 1, "word"))


@pytest.mark.parametrize(
    ("old", "new", "behaviour_version", "version", "expected"),
    [
        ([-1, -2, -3], [-1.5, -2.5, -3.5], [0, 0, 0], 2, [-1.25, -2.25, -3.25]),
        ([-1, -2], [-1.5, -2.2], [0, 2], 4, [-1.375, -2.1]),
        ([-1, -1, -1, -1], [-2, -2, -2, -2], [5, 4, -1, 3], 4, [-1, -1, -1, -1]),
    ],
)
def test_loglinear(old, new, behaviour_version, version, expected):
    now = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    got = loglinear_logprobs(now, torch.tensor(old, dtype=torch.float64), torch.tensor(behaviour_version), version)
    assert got.tolist() == pytest.approx(expected)
    assert not got.requires_grad
