"""Reward and advantage normalisation against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import on_ranks

from pekoe.pipeline.algorithm.normalise import RewardRows, normalise_rewards, normalise_tokens
from pekoe.pipeline.config.actor import NormConfig

BATCH_LOO = NormConfig(mean_level="batch", std_level=None, mean_leave1out=True)
GROUP = NormConfig()


def rewards(values, groups=None, samples=None, config=GROUP, keep=None):
    values = np.array(values, dtype=np.float64)
    groups = np.zeros(len(values), np.int64) if groups is None else np.array(groups)
    samples = np.arange(len(values)) if samples is None else np.array(samples)
    keep = np.ones(len(values), bool) if keep is None else keep
    return normalise_rewards(RewardRows(values, groups, samples, keep), config)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 3, 4], [-2, -2 / 3, 2 / 3, 2]), ([10, 20, 30], [-15, 0, 15]), ([7], [7])],
)
def test_batch_leave_one_out_without_std(values, expected):
    np.testing.assert_allclose(rewards(values, config=BATCH_LOO), expected, rtol=1e-14)


def test_leave_one_out_with_unbiased_std_over_active_tokens():
    values = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64)
    mask = torch.tensor([1, 1, 1, 0, 0, 1])
    config = NormConfig(mean_level="batch", std_level="batch", mean_leave1out=True)
    out = normalise_tokens(values, mask, torch.tensor([0, 2, 4, 6]), torch.tensor([0, 1, 2]), config)
    expected = torch.tensor([-0.9258, -0.4629, 0, 0, 0, 1.3887], dtype=torch.float64)
    torch.testing.assert_close(out, expected, atol=6e-5, rtol=0)


def test_group_level_of_uneven_interleaved_groups():
    values = [1, 10, 2, 5, 3, 12, 6, 4, 7]
    groups = [0, 1, 0, 2, 0, 1, 2, 0, 2]
    out = rewards(values, groups)
    for group in (0, 1, 2):
        own = np.array([v for v, g in zip(values, groups, strict=True) if g == group], dtype=np.float64)
        expected = (own - own.mean()) / (own.std(ddof=1) + 1e-5)
        np.testing.assert_allclose([o for o, g in zip(out, groups, strict=True) if g == group], expected, rtol=1e-12)


def test_left_over_row_is_bounded():
    np.testing.assert_allclose(rewards([1, 2, 3], [0, 0, 1])[2], 0)


@pytest.mark.parametrize("leave1out", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
def test_singleton_group_gives_zero(leave1out, unbiased):
    config = NormConfig(mean_leave1out=leave1out, std_unbiased=unbiased)
    assert rewards([3.5], config=config)[0] == 0


def test_std_of_one_with_unbiased_and_no_mean():
    config = NormConfig(mean_level=None, std_level="batch")
    np.testing.assert_allclose(rewards([3.5], config=config), 3.5 / (1 + 1e-5))


def test_mean_of_group_and_std_of_batch():
    config = NormConfig(mean_level="group", std_level="batch")
    deviations = np.array([-0.5, 0.5, -5, 5])
    expected = deviations / (np.sqrt((deviations**2).sum() / 3) + 1e-5)
    np.testing.assert_allclose(rewards([0, 1, 10, 20], [4, 4, 9, 9], config=config), expected, rtol=1e-12)


@pytest.mark.parametrize("leave1out", [False, True])
def test_tiny_variance_counts_as_zero(leave1out):
    config = NormConfig(mean_leave1out=leave1out)
    nearly = np.array([0.35] * 7 + [0.35 + 3e-8])
    assert (rewards(nearly, config=config) == 0).all()
    assert (rewards([0.4, 0.4], config=config) == 0).all()
    single = rewards(np.float32([0.35] * 7 + [0.95]).astype(np.float64), config=config)
    assert np.isfinite(single).all()
    assert np.abs(single).max() < 3


def test_masked_rows_do_not_vote():
    keep = np.array([True, True, False])
    config = NormConfig(std_level=None)
    np.testing.assert_allclose(rewards([1, 0, 1], config=config, keep=keep), [0.5, -0.5, 0])
    np.testing.assert_allclose(rewards([1, 0, 1], config=config, keep=np.zeros(3, bool)), [1, 0, 1])


def test_an_episode_of_several_sequences_votes_once():
    config = NormConfig(std_level=None)
    out = rewards([1, 1, 1, 0], groups=[5, 5, 5, 5], samples=[0, 0, 0, 1], config=config)
    np.testing.assert_allclose(out, [0.5, 0.5, 0.5, -0.5])
    loo = rewards([1, 1, 1, 0], [5] * 4, [0, 0, 0, 1], NormConfig(std_level=None, mean_leave1out=True))
    np.testing.assert_allclose(loo, [1, 1, 1, -1])
    both = rewards([1, 1, 1, 0], [5] * 4, [0, 0, 0, 1], GROUP)
    np.testing.assert_allclose(both, np.array([0.5, 0.5, 0.5, -0.5]) / (np.sqrt(0.5) + 1e-5))


def test_voters_on_other_ranks_in_any_order_give_the_same_to_the_bit():
    rng = np.random.default_rng(3)
    groups, samples = rng.integers(0, 5, 40), rng.integers(0, 4, 40)
    rows = RewardRows(rng.normal(size=40), groups, samples, rng.random(40) < 0.8)
    for config in (GROUP, NormConfig(mean_leave1out=True, std_level=None), NormConfig("batch", "batch")):
        whole = normalise_rewards(rows, config)
        order = rng.permutation(40)
        voters = RewardRows(*(getattr(rows, name)[order] for name in ("rewards", "groups", "samples", "keep")))
        part = slice(7, 19)
        own = RewardRows(rows.rewards[part], groups[part], samples[part], rows.keep[part])
        np.testing.assert_array_equal(normalise_rewards(own, config, voters), whole[part])
        assert len(normalise_rewards(RewardRows(*(getattr(rows, n)[:0] for n in vars(rows))), config, voters)) == 0


def test_fan_out_does_not_change_what_an_episode_weighs():
    """An episode of three rows beside two of one row: the same as with one row each."""
    plain = rewards([1, 0, 4], groups=[2, 2, 2], samples=[0, 1, 2])
    fanned = rewards([1, 1, 1, 0, 4], groups=[2] * 5, samples=[0, 0, 0, 1, 2])
    np.testing.assert_allclose(fanned, plain[[0, 0, 0, 1, 2]], rtol=1e-14)


def test_none_returns_the_input():
    np.testing.assert_array_equal(rewards([1, 2, 3], config=None), [1, 2, 3])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-20, 20, width=32)), min_size=1, max_size=24),
    st.sampled_from(["batch", "group", None]),
    st.sampled_from(["batch", "group", None]),
    st.booleans(),
    st.booleans(),
    st.randoms(),
)
def test_finite_bounded_and_independent_of_order(rows, mean_level, std_level, leave1out, unbiased, random):
    config = NormConfig(mean_level, std_level, leave1out, unbiased)
    groups, values = zip(*rows, strict=True)
    out = rewards(values, groups, config=config)
    assert np.isfinite(out).all()
    if std_level == "batch":
        assert np.abs(out).max() <= max(20, np.sqrt(len(rows)) * 1.01)
    order = list(range(len(rows)))
    random.shuffle(order)
    again = rewards([values[i] for i in order], [groups[i] for i in order], config=config)
    np.testing.assert_allclose(again, out[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mean_level", ["batch", "group"])
@pytest.mark.parametrize("std_level", ["batch", "group", None])
@pytest.mark.parametrize("leave1out", [False, True])
def test_tokens_on_two_ranks_equal_one(mean_level, std_level, leave1out):
    config = NormConfig(mean_level, std_level, leave1out)
    torch.manual_seed(0)
    values, mask = torch.randn(12, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1])
    cu_seqlens, groups = torch.tensor([0, 3, 6, 9, 12]), torch.tensor([1, 0, 1, 2])
    whole = normalise_tokens(values, mask, cu_seqlens, groups, config)
    parts = [
        (values[:6], mask[:6], torch.tensor([0, 3, 6]), groups[:2]),
        (values[6:], mask[6:], torch.tensor([0, 3, 6]), groups[2:]),
    ]
    out = on_ranks(2, lambda rank, over: normalise_tokens(*parts[rank], config, over.sum, over.max, num_groups=3))
    torch.testing.assert_close(torch.cat(out), whole, atol=1e-12, rtol=1e-12)
    assert (whole[mask == 0] == 0).all()


def test_all_masked_tokens_are_returned():
    values = torch.tensor([1.0, 2.0])
    out = normalise_tokens(values, torch.zeros(2), torch.tensor([0, 2]), torch.tensor([0]), GROUP)
    torch.testing.assert_close(out, values)
