"""Advantage estimation in both units against closed forms and against the recurrence written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.algorithm.estimator_terms import EstimatorTerms
from pekoe.pipeline.algorithm.gae import gae, lambdas
from pekoe.pipeline.algorithm.reduction import OneRank
from pekoe.pipeline.algorithm.timesteps import timesteps
from pekoe.pipeline.config.actor import ActorConfig


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def run(rewards, mask, lengths=None, turns=None, values=None, bootstrap=None, **settings):
    """(advantages, returns) as lists."""
    lengths = [len(mask)] if lengths is None else lengths
    turns = [0 if active else -1 for active in mask] if turns is None else turns
    terms = EstimatorTerms(
        rewards=f64(rewards), mask=torch.tensor(mask, dtype=torch.bool), turns=torch.tensor(turns, dtype=torch.int64),
        cu_seqlens=torch.tensor(np.cumsum([0, *lengths])), values=None if values is None else f64(values),
        bootstrap=None if bootstrap is None else f64(bootstrap), groups=torch.zeros(len(lengths), dtype=torch.int64),
        num_groups=1, samples=torch.zeros(len(lengths), dtype=torch.int64), config=ActorConfig(**settings),
        over=OneRank(),
    )  # fmt: skip
    advantages, returns = gae(terms)
    assert advantages.dtype == returns.dtype == torch.float64
    return advantages.tolist(), returns.tolist()


def test_turns_without_values():
    advantages, returns = run([0, 1, 0, 2], [1] * 4, turns=[0, 0, 1, 1], gae_unit="turn", gae_lambda=0.5)
    assert advantages == returns == [2, 2, 2, 2]


def test_turns_with_values_a_tool_and_a_bootstrap():
    advantages, returns = run(
        [0, 3, 0, 0, 4], [1, 1, 0, 1, 1], turns=[0, 0, -1, 2, 2], values=[1, 5, 9, 2, 8], bootstrap=[8],
        gae_unit="turn", discount=0.5, gae_lambda=0.25,
    )  # fmt: skip
    assert advantages == [3.75, 3.75, 0, 6, 6]
    assert returns == [4.75, 4.75, 9, 8, 8]


def test_lambda_of_each_sequence_and_masked_last_token():
    """relative with q .25 gives lambda .5 to three tokens, vapo with alpha 1/3 gives them 0."""
    rewards, mask = [0, 0, 1, 0], [1, 1, 1, 0]
    assert run(rewards, mask, gae_lambda_by_length="relative", gae_lambda_q=0.25)[0] == [0.25, 0.5, 1, 0]
    assert run(rewards, mask, gae_lambda_by_length="vapo", gae_lambda_alpha=1 / 3)[0] == [0, 0, 1, 0]
    two = run([*rewards, 0, 1], [*mask, 1, 1], [4, 2], gae_lambda_by_length="relative", gae_lambda_q=0.25)[0]
    assert two == [0.25, 0.5, 1, 0, 0.25, 1]


def test_lambdas_by_length():
    lengths = torch.tensor([4, 2, 0])
    vapo = ActorConfig(gae_lambda_by_length="vapo", gae_lambda_alpha=1.0)
    assert lambdas(lengths, vapo).tolist() == [0.75, 0.5, 0]
    assert lambdas(torch.tensor([1]), vapo).tolist() == [0]
    relative = ActorConfig(gae_lambda_by_length="relative", gae_lambda_q=0.3)
    got = lambdas(torch.tensor([0, 1, 2, 11]), relative).tolist()
    assert got == pytest.approx([0, 1, 0.3, 0.3**0.1])
    assert got[3] ** 10 == pytest.approx(0.3), "the last timestep has weight q at the first"
    assert lambdas(torch.tensor([0, 5]), ActorConfig(gae_lambda=0.7)).tolist() == [0.7, 0.7]
    with pytest.raises(ValueError, match="gae_lambda_by_length: 'word'"):
        lambdas(lengths, ActorConfig(gae_lambda_by_length="word"))
    with pytest.raises(ValueError, match="gae_unit: 'word'"):
        run([1.0], [1], gae_unit="word")


def test_length_is_counted_in_timesteps_of_the_unit():
    """Four tokens in two turns: vapo with alpha 1 gives .75 in tokens and .5 in turns."""
    options = {"turns": [0, 0, 1, 1], "gae_lambda_by_length": "vapo", "gae_lambda_alpha": 1.0}
    assert run([0, 0, 0, 1], [1] * 4, **options)[0] == pytest.approx([0.75**3, 0.75**2, 0.75, 1])
    assert run([0, 0, 0, 1], [1] * 4, gae_unit="turn", **options)[0] == [0.5, 0.5, 1, 1]


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_observation_tokens_neither_cut_nor_leak(unit):
    mask, turns = [1, 1, 0, 0, 1, 1], [0, 0, -1, -1, 1, 1]
    returns = run([0, 0, 0, 0, 0, 1], mask, turns=turns, gae_unit=unit)[1]
    assert [r for r, m in zip(returns, mask, strict=True) if m] == [1, 1, 1, 1]
    assert run([0, 1, 0], [1, 1, 0], values=[0, 0, 100], gae_unit=unit)[0] == [1, 1, 0]
    nan = run([0, 1, math.nan], [1, 1, 0], values=[0, 0, math.nan], gae_unit=unit)[0]
    assert nan == [1, 1, 0]


def test_values_and_bootstrap():
    advantages, returns = run([0, 2], [1, 1], values=[1, 3], bootstrap=[4], discount=0.5, gae_lambda=0.5)
    last = 2 + 0.5 * 4 - 3
    first = 0 + 0.5 * 3 - 1 + 0.25 * last
    assert advantages == pytest.approx([first, last])
    assert returns == pytest.approx([first + 1, last + 3])


def test_without_decay_advantages_of_a_perfect_critic_are_zero():
    """V = what is still to come."""
    advantages, returns = run([0, 0, 5], [1, 1, 1], values=[5, 5, 5], gae_lambda=0.3)
    assert advantages == [0, 0, 0]
    assert returns == [5, 5, 5]


def test_a_turn_discount_counts_turns_not_tokens():
    advantages, _ = run([0] * 6 + [1], [1] * 7, turns=[0, 0, 0, 1, 1, 2, 2], gae_unit="turn", discount=0.5)
    assert advantages == [0.25, 0.25, 0.25, 0.5, 0.5, 1, 1]


def test_timesteps_of_turns():
    mask = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0], dtype=torch.bool)
    steps = timesteps(mask, torch.tensor([-1, 0, -1, 0, 1, -1, 1, -1]), torch.tensor([0, 5, 5, 8]), "turn")
    assert steps.first.tolist() == [1, 4, 6]
    assert steps.last.tolist() == [3, 4, 6]
    assert steps.sequence.tolist() == [0, 0, 2]
    assert steps.counts.tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match="gae_unit: 'word'"):
        timesteps(mask, mask, torch.tensor([0, 8]), "word")


def plain_gae(rewards, values, discount, decay, end):
    """The recurrence written out for one sequence of timesteps."""
    out, running, following = [], 0.0, end
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + discount * following - value + decay * running
        following = value
        out.append(running)
    return out[::-1]


def plain_turns(rewards, values, turns, discount, decay, end):
    """The same for turns: rewards summed, the value of the first token, the result on each token."""
    starts = [i for i in range(len(turns)) if i == 0 or turns[i] != turns[i - 1]]
    bounds = list(zip(starts, [*starts[1:], len(turns)][: len(starts)], strict=True))
    sums = [sum(rewards[a:b]) for a, b in bounds]
    own = plain_gae(sums, [values[a] for a, _ in bounds], discount, decay, end)
    return [advantage for advantage, (a, b) in zip(own, bounds, strict=True) for _ in range(a, b)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(-1, 3), min_size=1, max_size=40), min_size=1, max_size=6),
    st.integers(0, 10**6),
    st.sampled_from(["token", "turn"]),
)
def test_packed_equals_one_by_one(rows, seed, unit):
    rng = np.random.default_rng(seed)
    rows = [sorted(row) for row in rows]
    turns = [turn for row in rows for turn in row]
    mask = [turn >= 0 for turn in turns]
    rewards, values, end = rng.normal(size=len(turns)), rng.normal(size=len(turns)), rng.normal(size=len(rows))
    advantages, returns = run(
        rewards, mask, [len(row) for row in rows], turns, values, end, gae_unit=unit, discount=0.9, gae_lambda=0.7
    )
    place = 0
    for row, last in zip(rows, end, strict=True):
        keep = [place + i for i, turn in enumerate(row) if turn >= 0]
        place += len(row)
        own = rewards[keep].tolist(), values[keep].tolist()
        expected = (
            plain_gae(*own, 0.9, 0.63, last)
            if unit == "token"
            else plain_turns(*own, [turns[i] for i in keep], 0.9, 0.63, last)
        )
        assert [advantages[i] for i in keep] == pytest.approx(expected, abs=1e-12)
    assert all(advantages[i] == 0 and returns[i] == values[i] for i, active in enumerate(mask) if not active)


def test_nothing_at_all():
    assert run([], [], []) == ([], [])
    assert run([0.0], [0], [1], [-1], gae_unit="turn") == ([0], [0])
    assert run([1.0, 2], [0, 0], values=[3.0, 4]) == ([0, 0], [3, 4])
