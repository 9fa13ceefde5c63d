"""Shaping and placing of rewards against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pekoe.pipeline.algorithm.rewards import overlong_penalty, place_outcomes, place_turn_rewards, shape_rewards
from pekoe.pipeline.config.actor import ActorConfig


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_bias_then_scaling_then_clip():
    np.testing.assert_allclose(shape_rewards(np.array([0.0, 1, 100]), bias=-0.5, scaling=10, clip=20), [-5, 5, 20])
    with pytest.raises(ValueError, match="reward_clip: 0"):
        shape_rewards(np.zeros(1), clip=0)


def test_overlong_penalty_grows_over_the_last_tokens_to_the_factor():
    config = ActorConfig(overlong_reward_penalty=True, overlong_tokens=4, overlong_penalty_factor=0.5)
    lengths = np.array([0, 5, 6, 7, 8, 9, 10, 11, 500])
    expected = [0, 0, 0, -0.125, -0.25, -0.375, -0.5, -0.5, -0.5]
    np.testing.assert_allclose(overlong_penalty(lengths, 10, config), expected)
    np.testing.assert_array_equal(overlong_penalty(lengths, 10, ActorConfig(overlong_tokens=4)), 0)


@pytest.mark.parametrize("tokens", [0, 11])
def test_overlong_penalty_needs_tokens_to_grow_over(tokens):
    with pytest.raises(ValueError, match=rf"actor\.overlong_tokens: {tokens} is not allowed .* 1 to .*10"):
        overlong_penalty(np.array([3]), 10, ActorConfig(overlong_reward_penalty=True, overlong_tokens=tokens))


def test_outcome_lies_on_the_last_active_token():
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1])
    out = place_outcomes(f64([2, 5, -1]), mask, torch.tensor([0, 4, 6, 8]))
    torch.testing.assert_close(out, f64([0, 0, 2, 0, 0, 0, 0, -1]))


def test_outcome_of_nothing():
    assert len(place_outcomes(torch.zeros(0), torch.zeros(0), torch.tensor([0]))) == 0


@pytest.mark.parametrize(
    "given", [[0, 0.5, 0, 0, 9, 0, -1], [0, 0, 0.5, 0, 9, 0, -1], [0, 0.25, 0.25, 0, 9, -0.5, -0.5]]
)
def test_turn_rewards_lie_on_the_last_active_token_of_their_turn(given):
    """Scaled and clipped; the bias is the outcome's alone."""
    mask, turns = torch.tensor([0, 1, 1, 0, 1, 1, 1]), torch.tensor([-1, 0, 0, -1, 1, 2, 2])
    config = ActorConfig(reward_scaling=2.0, reward_bias=100.0, reward_clip=5.0)
    out = place_turn_rewards(f64(given), mask, turns, torch.tensor([0, 7]), config)
    torch.testing.assert_close(out, f64([0, 0, 1, 0, 5, 0, -2]))


def test_a_turn_ends_with_its_sequence():
    mask, turns = torch.ones(4), torch.zeros(4, dtype=torch.int64)
    out = place_turn_rewards(f64([1, 0, 0, 2]), mask, turns, torch.tensor([0, 2, 4]), ActorConfig())
    torch.testing.assert_close(out, f64([0, 1, 0, 2]))
