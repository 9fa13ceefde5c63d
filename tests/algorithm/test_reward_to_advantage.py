"""From rewards to advantages in one pass: order of the stages, KL reward, turns, truncation, statistics, errors."""

from __future__ import annotations

import math
import sys
import types

import numpy as np
import pytest
import torch
from simulated_ranks import on_ranks, packed, trajectory

from pekoe.pipeline.algorithm.reduction import OneRank
from pekoe.pipeline.algorithm.reward_to_advantage import add_advantages
from pekoe.pipeline.algorithm.segments import segment_sum
from pekoe.pipeline.config.actor import ActorConfig, NormConfig
from pekoe.pipeline.records import Finish, group_number

NO_NORM = {"reward_norm": None}


def run(batches, max_new_tokens=10, **settings):
    """(advantages, returns, sums) of one rank; arrays of all batches end to end."""
    config = ActorConfig(**settings)
    groups = sorted({int(group) for batch in batches for group in batch.groups})
    sums = add_advantages(batches, config, max_new_tokens, OneRank(), groups=groups)
    for batch in batches:
        assert batch.extra["advantages"].dtype == batch.extra["returns"].dtype == np.float32
    advantages, returns = (np.concatenate([b.extra[name] for b in batches]) for name in ("advantages", "returns"))
    return advantages, returns, sums


def test_uneven_groups_by_id_over_micro_batches():
    """Rewards [1, 2, 3, 4 | 10, 12 | 5, 6, 7], interleaved and cut anywhere."""
    one, two, three = (group_number(3, place) for place in (9, 2, 7))
    rows = [(one, 1), (two, 10), (three, 5), (one, 2), (three, 6), (one, 3), (two, 12), (three, 7), (one, 4)]
    made = [(group, trajectory([0, 1], float(reward), sample=i)) for i, (group, reward) in enumerate(rows)]
    batches = [packed(*made[:4]), packed(), packed(*made[4:])]
    advantages, _, sums = run(batches)
    for group in (one, two, three):
        own = np.array([r for g, r in rows if g == group], dtype=float)
        got = [advantages[2 * i + 1] for i, (g, _) in enumerate(rows) if g == group]
        np.testing.assert_allclose(got, (own - own.mean()) / (own.std(ddof=1) + 1e-5), rtol=1e-6)
    assert (sums["reward_sequences"], sums["reward_groups"], sums["zero_variance_groups"]) == (9, 3, 0)


def test_left_over_row_and_equal_rewards_give_zero():
    rows = [(0, 1.0), (0, 2.0), (1, 3.0), (2, 0.35), (2, 0.35), (2, 0.35)]
    batch = packed(*((g, trajectory([0, 1], r, sample=i)) for i, (g, r) in enumerate(rows)))
    advantages, _, sums = run([batch])
    np.testing.assert_array_equal(advantages[5::2], 0)
    assert np.isfinite(advantages).all()
    assert sums["zero_variance_groups"] == 2


def test_penalty_then_bias_then_scaling_then_clip_then_norm():
    """Ten sampled tokens of at most ten: the penalty is the whole factor. (1 - .5 + 1) 2 = 3, clipped to 2.5."""
    long, short = trajectory([0, *[1] * 10], 1.0), trajectory([0, 1], 0.0, sample=1)
    options = {
        "overlong_reward_penalty": True, "overlong_tokens": 4, "overlong_penalty_factor": 0.5, "reward_bias": 1.0,
        "reward_scaling": 2.0, "reward_clip": 2.5,
    }  # fmt: skip
    advantages, _, sums = run([packed((0, long), (0, short))], **options, **NO_NORM)
    assert advantages[[10, 12]].tolist() == [2.5, 2.0]
    assert (sums["reward_raw"], sums["reward_shaped"], sums["overlong_penalty"]) == (1, 4.5, -0.5)
    assert sums["reward_shaped_squares"] == 2.5**2 + 2**2
    config = NormConfig(std_level=None)
    assert run([packed((0, long), (0, short))], **options, reward_norm=config)[0][[10, 12]].tolist() == [0.25, -0.25]


def test_outcome_and_turn_rewards_both_arrive():
    """Discounts count turns; the bias and the norm speak of outcomes, scale and clip of both."""
    row = trajectory([0, 1, 1, 0, 1, 1], 1.0)
    batch = packed((0, row), turn_rewards=[0, 0, 0.5, 0, 0, -0.25])
    options = {"gae_unit": "turn", "discount": 0.5, "reward_scaling": 2.0, "reward_bias": 1.0, "reward_clip": 3.0}
    advantages, returns, sums = run([batch], **options, **NO_NORM)
    last = 3.0 - 0.5
    assert advantages.tolist() == [0, 1 + last / 2, 1 + last / 2, 0, last, last]
    assert returns.tolist() == advantages.tolist()
    assert sums["turn_reward_sum"] == 0.5


@pytest.mark.parametrize(("second", "equal"), [([0.5, 0, 0.5], 1), ([0.5, 0.5, 0], 0), ([0.5, 0, 0], 0)])
def test_a_group_is_of_zero_variance_when_its_turns_are_equal_too(second: list[float], equal: int):
    """The outcome is 0 for all; turns of any length, the same sum earned at another turn is something else."""
    row, other = trajectory([0, 1, 0, 1, 0, 1]), trajectory([0, 1, 1, 0, 1, 0, 0, 1], sample=1)
    given = np.zeros(14)
    given[[1, 5]] = 0.5
    given[[6 + 2, 6 + 4, 6 + 7]] = second
    sums = run([packed((0, row), (0, other), turn_rewards=given)], **NO_NORM)[2]
    assert (sums["reward_groups"], sums["zero_variance_groups"]) == (1, equal)


def test_turn_rewards_need_not_be_in_every_micro_batch():
    first = packed((0, trajectory([0, 1], 0.0)), turn_rewards=[0, 2.0])
    second = packed((0, trajectory([0, 1], 1.0, sample=1)))
    assert run([first, second], **NO_NORM)[0].tolist() == [0, 2, 0, 1]


def test_scores_of_a_reward_model_are_added_before_shaping():
    batch = packed((0, trajectory([0, 1], 1.0)), (0, trajectory([0, 1], 0.0, sample=1)), model_scores=[-0.25, 0.75])
    advantages, _, sums = run([batch], reward_scaling=2.0, **NO_NORM)
    assert advantages.tolist() == [0, 1.5, 0, 1.5]
    assert sums["reward_raw"] == 1.5


def kl_batch(**extra):
    row = trajectory([0, 1, 0, 1], 1.0, logprobs=[0, -1.0, 0, -2.0])
    return packed((0, row), ref_logprobs=[np.nan, -1.5, np.nan, -1.0], **extra)


def test_kl_reward_in_token_unit_enters_rewards_and_returns():
    advantages, returns, sums = run([kl_batch()], kl_ctl=0.1, discount=0.5, **NO_NORM)
    expected = [-0.05 + 0.5 * 1.1, 1 + 0.1]
    np.testing.assert_allclose(advantages[[1, 3]], expected, rtol=1e-6)
    np.testing.assert_allclose(returns[[1, 3]], expected, rtol=1e-6)
    assert sums["kl_reward_sum"] == pytest.approx(0.05)


def test_kl_reward_in_turn_unit_is_added_after_gae_and_not_to_returns():
    advantages, returns, _ = run([kl_batch()], kl_ctl=0.1, discount=0.5, gae_unit="turn", **NO_NORM)
    np.testing.assert_allclose(advantages[[1, 3]], [0.5 - 0.05, 1 + 0.1], rtol=1e-6)
    np.testing.assert_allclose(returns[[1, 3]], [0.5, 1])
    assert advantages[0] == advantages[2] == 0


@pytest.mark.parametrize(
    ("kind", "value"), [("k1", lambda x: x), ("k2", lambda x: x * x / 2), ("k3", lambda x: math.exp(-x) - 1 + x)]
)
def test_kl_reward_is_of_the_proximal_policy_where_it_was_computed(kind, value):
    batch = kl_batch(prox_logprobs=[0, -1.25, 0, -0.5])
    advantages, _, _ = run([batch], kl_ctl=0.1, kl_estimator=kind, discount=0.0, **NO_NORM)
    np.testing.assert_allclose(advantages[[1, 3]], [-0.1 * value(0.25), 1 - 0.1 * value(0.5)], rtol=1e-6)


def test_kl_reward_is_clamped():
    batch = packed((0, trajectory([0, 1, 1, 1], 0.0, logprobs=[0, -30.0, -1, -1])), ref_logprobs=[0, -1.0, -99, -1])
    for kind, expected in (("k1", [1, -1, 0]), ("k2", [-1, -1, 0]), ("k3", [-1, -1, 0])):
        advantages, _, _ = run([batch], kl_ctl=0.1, kl_estimator=kind, discount=0.0, **NO_NORM)
        np.testing.assert_allclose(advantages[1:], expected, rtol=1e-6)


def test_only_truncated_sequences_bootstrap():
    """Finish says which are truncated, whatever the critic gives at the end of the others."""
    rows = [trajectory([0, 1, 1], 0.0), trajectory([0, 1, 1], 0.0, sample=1, finish=Finish.LENGTH)]
    batch = packed(*((0, row) for row in rows), values=[9, 1.0, 2, 9, 1, 2], bootstrap=[4.0, 4.0])
    advantages, returns, sums = run([batch], discount=0.5, gae_lambda=0.0, **NO_NORM)
    assert advantages.tolist() == [0, 0, -2, 0, 0, 0]
    assert returns.tolist() == [9, 1, 0, 9, 1, 2]
    assert sums["return_error"] == -2
    assert sums["return_error_squares"] == 4
    assert (sums["return_sum"], sums["return_squares"]) == (4, 6)


def test_masked_truncated_sequences_have_no_vote_anywhere():
    """Group rewards [1, 0, 1], the third masked: baseline .5; no token of it trains or is counted."""
    rows = [trajectory([0, 1], 1.0), trajectory([0, 1, 1], 0.0, sample=1)]
    masked = trajectory([0, 1, 1], 1.0, sample=2, finish=Finish.LENGTH)
    options = {"reward_norm": NormConfig(std_level=None), "mask_truncated": True}
    advantages, _, sums = run([packed(*((0, row) for row in [*rows, masked]))], **options)
    assert advantages.tolist() == [0, 0.5, 0, -0.5, -0.5, 0, 0, 0]
    assert (sums["reward_sequences"], sums["advantage_tokens"], sums["reward_raw"]) == (2, 3, 1)
    kept = run([packed(*((0, row) for row in [*rows, masked]))], reward_norm=NormConfig(std_level=None))[0]
    np.testing.assert_allclose(kept[[1, 4, 7]], [1 / 3, -2 / 3, 1 / 3], rtol=1e-6)
    padding = NormConfig("batch", "batch")
    normalised = run([packed(*((0, row) for row in [*rows, masked]))], **options, adv_norm=padding)[0]
    own = np.array([0.5, -0.5, -0.5])
    np.testing.assert_allclose(normalised[[1, 3, 4]], (own - own.mean()) / (own.std(ddof=1) + 1e-5), rtol=1e-6)


def test_reinforce_pp_normalises_tokens_after_the_kl_reward():
    rows = [(g, trajectory([0, 1, 1], r, sample=i)) for i, (g, r) in enumerate([(0, 1.0), (0, 0.0), (1, 1.0)])]
    batch = packed(*rows, ref_logprobs=np.full(9, -1.5))
    norm = NormConfig("batch", "batch")
    advantages, _, sums = run([batch], kl_ctl=0.1, adv_norm=norm, **NO_NORM)
    tokens = np.array([1 - 0.1, 1 - 0.05, -0.1, -0.05, 1 - 0.1, 1 - 0.05])
    expected = (tokens - tokens.mean()) / (tokens.std(ddof=1) + 1e-5)
    np.testing.assert_allclose(advantages.reshape(3, 3)[:, 1:].ravel(), expected, rtol=1e-5)
    assert sums["advantage_sum"] == pytest.approx(0, abs=1e-9)
    assert sums["advantage_squares"] == pytest.approx(5, rel=1e-4)
    assert sums["advantage_abs_max"] == pytest.approx(np.abs(expected).max())


def test_what_a_run_does_not_have_is_absent_from_its_sums():
    sums = run([packed((0, trajectory([0, 1], 1.0)))])[2]
    assert not {"turn_reward_sum", "kl_reward_sum", "return_error", "return_squares"} & sums.keys()
    assert sums["advantage_abs_max"] == 0
    nothing = add_advantages([], ActorConfig(), 10, OneRank(), groups=[])
    assert "advantage_abs_max" not in nothing
    assert not any(nothing.values())


def test_a_rank_without_rows_takes_part():
    batch = packed(
        (7, trajectory([0, 1], 1.0)), (7, trajectory([0, 1], 0.0, sample=1)), values=[0.5] * 4, bootstrap=[0, 0]
    )
    settings = ActorConfig(adv_norm=NormConfig("batch", "batch"))

    def job(rank, over):
        return add_advantages([[], [packed(), batch], [packed()]][rank], settings, 10, over, groups=[7])

    alone = add_advantages([batch], settings, 10, OneRank(), groups=[7])
    for sums in on_ranks(3, job):
        assert sums == pytest.approx(alone)


def test_an_estimator_of_the_user(monkeypatch):
    """Group-relative over all ranks: an episode's outcome less its group's best one."""

    def below_the_best(terms):
        outcome = segment_sum(
            terms.rewards,
            torch.repeat_interleave(torch.arange(len(terms.groups)), torch.diff(terms.cu_seqlens)),
            len(terms.groups),
        )
        best = torch.full((terms.num_groups,), -torch.inf, dtype=torch.float64)
        best = terms.over.max(best.scatter_reduce(0, terms.groups, outcome, reduce="amax"))
        spread = torch.repeat_interleave(outcome - best[terms.groups], torch.diff(terms.cu_seqlens))
        return torch.where(terms.mask, spread, 0), torch.zeros_like(spread)  # fmt: skip

    module = types.ModuleType("users_estimator")
    module.below_the_best = below_the_best
    monkeypatch.setitem(sys.modules, "users_estimator", module)
    config = ActorConfig(advantage_estimator="users_estimator:below_the_best", reward_norm=None)
    parts = [packed((5, trajectory([0, 1], 1.0)), (3, trajectory([0, 1], 4.0))), packed((5, trajectory([0, 1], 3.0)))]

    def job(rank, over):
        add_advantages([parts[rank]], config, 10, over, groups=[5, 3])
        return parts[rank].extra["advantages"].tolist()

    assert on_ranks(2, job) == [[0, -2, 0, 0], [0, 0]]


def test_what_is_missing_is_named():
    row = (0, trajectory([0, 1], 1.0))
    with pytest.raises(ValueError, match="ref_logprobs is missing in 1 of 1"):
        run([packed(row)], kl_ctl=0.1)
    with pytest.raises(ValueError, match="values is missing in 1 of 2"):
        run([packed(row, values=[0, 0], bootstrap=[0]), packed(row, bootstrap=[0])])
    with pytest.raises(ValueError, match="bootstrap is missing"):
        run([packed(row, values=[0, 0])])
    with pytest.raises(ValueError, match="turn_rewards: not 0 on a token that was not sampled"):
        run([packed(row, turn_rewards=[1.0, 0])])
    with pytest.raises(ValueError, match=r"groups: \[0\] of the batches"):
        add_advantages([packed(row)], ActorConfig(), 10, OneRank(), groups=[1, 2])
    with pytest.raises(ValueError, match=r"actor\.advantage_estimator: 'gea' is not known .*'gae'"):
        run([packed(row)], advantage_estimator="gea")
