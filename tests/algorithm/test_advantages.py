"""Rewards on tokens, and token-unit GAE, against closed forms."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.algorithm.advantages import place_outcomes, token_gae
from pekoe.pipeline.algorithm.rewards import shape_rewards


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_bias_then_scaling_then_clip():
    np.testing.assert_allclose(shape_rewards(np.array([0.0, 1, 100]), bias=-0.5, scaling=10, clip=20), [-5, 5, 20])


def test_outcome_lies_on_the_last_active_token():
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1])
    out = place_outcomes(f64([2, 5, -1]), mask, torch.tensor([0, 4, 6, 8]))
    torch.testing.assert_close(out, f64([0, 0, 2, 0, 0, 0, 0, -1]))


def test_lambda_of_each_sequence_and_masked_last_token():
    rewards, mask = f64([0, 0, 1, 0] * 2), torch.tensor([1, 1, 1, 0] * 2)
    advantages, _ = token_gae(rewards, mask, torch.tensor([0, 4, 8]), 1.0, f64([0.5, 0]))
    torch.testing.assert_close(advantages, f64([0.25, 0.5, 1, 0, 0, 0, 1, 0]))


def test_observation_tokens_neither_cut_nor_leak():
    mask = torch.tensor([1, 1, 0, 0, 1, 1])
    _, returns = token_gae(f64([0, 0, 0, 0, 0, 1]), mask, torch.tensor([0, 6]), 1.0, 1.0)
    torch.testing.assert_close(returns[mask.bool()], f64([1, 1, 1, 1]))
    values, short = f64([0, 0, 100]), torch.tensor([1, 1, 0])
    advantages, _ = token_gae(f64([0, 1, 0]), short, torch.tensor([0, 3]), 1.0, 1.0, values=values)
    torch.testing.assert_close(advantages, f64([1, 1, 0]))


def test_values_and_bootstrap():
    rewards, values = f64([0, 2]), f64([1, 3])
    advantages, returns = token_gae(
        rewards, torch.ones(2), torch.tensor([0, 2]), 0.5, 0.5, values=values, bootstrap=f64([4])
    )
    last = 2 + 0.5 * 4 - 3
    first = 0 + 0.5 * 3 - 1 + 0.25 * last
    torch.testing.assert_close(advantages, f64([first, last]))
    torch.testing.assert_close(returns, f64([first + 1, last + 3]))


def plain_gae(rewards, values, discount, decay, end):
    """The recurrence written out for one sequence of active tokens."""
    out, running, following = [], 0.0, end
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + discount * following - value + decay * running
        following = value
        out.append(running)
    return out[::-1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(0, 10**6))
def test_packed_equals_one_by_one(masks, seed):
    generator = torch.Generator().manual_seed(seed)
    flat = torch.tensor([m for mask in masks for m in mask])
    rewards = torch.randn(len(flat), dtype=torch.float64, generator=generator)
    values = torch.randn(len(flat), dtype=torch.float64, generator=generator)
    end = torch.randn(len(masks), dtype=torch.float64, generator=generator)
    cu_seqlens = torch.tensor(np.cumsum([0] + [len(mask) for mask in masks]))
    advantages, _ = token_gae(rewards, flat, cu_seqlens, 0.9, 0.7, values, end)
    for i in range(len(masks)):
        part = slice(int(cu_seqlens[i]), int(cu_seqlens[i + 1]))
        keep = flat[part]
        own = plain_gae(rewards[part][keep].tolist(), values[part][keep].tolist(), 0.9, 0.63, float(end[i]))
        torch.testing.assert_close(advantages[part][keep], f64(own), atol=1e-12, rtol=1e-12)


def test_empty_batch():
    none = torch.zeros(0)
    advantages, returns = token_gae(none, none, torch.tensor([0]), 1.0, 1.0)
    assert len(advantages) == len(returns) == len(place_outcomes(none, none, torch.tensor([0]))) == 0
