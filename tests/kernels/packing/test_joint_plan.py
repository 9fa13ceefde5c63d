"""The joint plan: limits kept, few micro-steps, balanced for either barrier, the same from every implementation."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.kernels.packing.packing import Barrier, JointPlan, joint_plan


def cost_table(plan: JointPlan, values: Any, num_ranks: int) -> Any:
    """[micro-step, rank] sums; every row is somewhere."""
    assert plan.rank.dtype == plan.micro_step.dtype == np.int64
    assert plan.rank.shape == plan.micro_step.shape == np.shape(values)
    place = plan.micro_step * num_ranks + plan.rank
    table = np.bincount(place, weights=values, minlength=plan.num_micro_steps * num_ranks)
    return table.reshape(plan.num_micro_steps, num_ranks)


def skewed(count: int, longest: int, mean: int, seed: int = 0) -> Any:
    return np.clip(np.random.default_rng(seed).lognormal(np.log(mean), 0.8, count), 1, longest).astype(np.int64)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    granularity = draw(st.sampled_from([1, 1, 2]))
    count = granularity * draw(st.integers(0, 25))
    sizes = st.one_of(st.integers(0, 50), st.sampled_from([0, 1, 50]))
    lengths = draw(st.lists(sizes, min_size=count, max_size=count))
    counts = draw(st.none() | st.lists(st.integers(0, 3), min_size=count, max_size=count))
    costs = draw(st.none() | st.lists(st.floats(0, 9, allow_subnormal=False), min_size=count, max_size=count))
    return {
        "lengths": np.array(lengths, dtype=np.int64),
        "num_ranks": draw(st.integers(1, 5)),
        "max_tokens": draw(st.integers(100, 150)),
        "max_sequences": draw(st.sampled_from([None, 6, 9])),
        "granularity": granularity,
        "barrier": draw(st.sampled_from(["micro_step", "step"])),
        "costs": costs,
        "counts": counts,
    }


@settings(max_examples=150, deadline=None)
@given(problems())
def test_properties(problem: dict[str, Any]) -> None:
    plan = joint_plan(**problem)
    lengths, ranks, granularity = problem["lengths"], problem["num_ranks"], problem["granularity"]
    tokens = cost_table(plan, lengths, ranks)
    assert (tokens <= problem["max_tokens"]).all()
    counts = np.ones(len(lengths)) if problem["counts"] is None else np.array(problem["counts"])
    if problem["max_sequences"] is not None:
        assert (cost_table(plan, counts, ranks) <= problem["max_sequences"]).all()
    for values in (plan.rank, plan.micro_step):
        assert (values.reshape(-1, granularity) == values[::granularity, None]).all()
    if len(lengths):
        assert len(np.unique(plan.micro_step)) == plan.num_micro_steps or not lengths.all()
        if problem["max_sequences"] is None:
            # A bin that is more than half full needs no company: twice the lower bound is enough.
            assert plan.num_micro_steps <= -(-(2 * int(lengths.sum()) // 100 + 2) // ranks)
    else:
        assert plan.num_micro_steps == 0


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_reference_gives_the_same_plan(problem: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plan = joint_plan(**problem)
        patch.setenv("PEKOE_KERNELS", "packing.joint_plan=reference")
        expected = joint_plan(**problem)
    np.testing.assert_array_equal(plan.rank, expected.rank)
    np.testing.assert_array_equal(plan.micro_step, expected.micro_step)
    assert plan.num_micro_steps == expected.num_micro_steps


@pytest.mark.parametrize("barrier", ["micro_step", "step"])
def test_a_large_batch_is_balanced(barrier: Barrier) -> None:
    """So full that all of it by the longest first does not fit, and all by best fit would leave micro-batches empty."""
    lengths = skewed(4096, 65536, 6000)
    plan = joint_plan(lengths, 64, 65536, barrier=barrier)
    tokens = cost_table(plan, lengths, 64)
    assert tokens.max() <= 65536
    assert tokens.min() > 0
    assert plan.num_micro_steps == -(-int(lengths.sum()) // (64 * 65536))
    mean = lengths.sum() / 64
    assert tokens.max(axis=1).sum() <= 1.005 * mean
    if barrier == "step":
        assert tokens.sum(axis=0).max() <= 1.0001 * mean


def test_each_objective_is_better_at_its_own() -> None:
    """Costs that grow faster than lengths, so that micro-batches differ."""
    lengths = np.random.default_rng(1).integers(1, 32_768, 512)
    costs = lengths * (1 + lengths / 20_000)
    tables = {}
    for barrier in ("micro_step", "step"):
        plan = joint_plan(lengths, 16, 32768, barrier=barrier, costs=costs)
        tables[barrier] = cost_table(plan, costs, 16)
        assert cost_table(plan, lengths, 16).max() <= 32768
    assert tables["micro_step"].max(axis=1).sum() < tables["step"].max(axis=1).sum()
    assert tables["step"].sum(axis=0).max() < tables["micro_step"].sum(axis=0).max()


def test_the_costliest_micro_batches_come_first() -> None:
    lengths = skewed(300, 8192, 900)
    plan = joint_plan(lengths, 4, 8192)
    tokens = cost_table(plan, lengths, 4)
    assert (np.diff(tokens.max(axis=1)) <= 0).all()
    assert (tokens[:-1].min(axis=1) >= tokens[1:].max(axis=1)).all()


def test_costs_are_balanced_and_lengths_budgeted() -> None:
    """Two long cheap rows and two short dear ones: the dear ones on different ranks."""
    plan = joint_plan([90, 90, 10, 10], 2, 100, costs=[1, 1, 50, 50])
    assert plan.num_micro_steps == 1
    assert plan.rank.tolist() in ([0, 1, 0, 1], [0, 1, 1, 0])


def test_best_fit_where_the_lightest_bin_leaves_no_room() -> None:
    """6 and 5 in different bins take 4 and 3 to 10 and 8: no room for 2 and 2. Best fit: 6 + 4, 5 + 3 + 2, 2."""
    lengths = np.array([6, 4, 4, 3, 3])
    plan = joint_plan(lengths, 1, 10)
    assert plan.num_micro_steps == 2
    assert cost_table(plan, lengths, 1).ravel().tolist() == [10, 10]


def test_limits_of_sequences() -> None:
    plan = joint_plan(np.ones(10, int), 2, 100, max_sequences=2)
    assert plan.num_micro_steps == 3
    plan = joint_plan(np.ones(4, int), 1, 100, max_sequences=5, counts=[4, 1, 4, 1])
    assert plan.num_micro_steps == 2
    assert sorted(cost_table(plan, np.array([4, 1, 4, 1]), 1).ravel()) == [5, 5]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"max_tokens: item 1 has 101 tokens, more than 100"):
        joint_plan([1, 101], 2, 100)
    with pytest.raises(ValueError, match=r"max_tokens: items 2\.\.3 have 120 tokens, more than 100"):
        joint_plan([1, 1, 60, 60], 2, 100, granularity=2)
    with pytest.raises(ValueError, match=r"max_sequences: item 1 has 4 sequences, more than 3"):
        joint_plan([1, 1], 2, 100, max_sequences=3, counts=[1, 4])
    with pytest.raises(ValueError, match=r"max_sequences: 1 is below granularity 2"):
        joint_plan([1, 1], 2, 100, max_sequences=1, granularity=2)
    with pytest.raises(ValueError, match=r"granularity: 2 does not divide 3 rows"):
        joint_plan([1, 1, 1], 2, 100, granularity=2)
    with pytest.raises(ValueError, match=r"costs: 1 values for 2 rows"):
        joint_plan([1, 1], 2, 100, costs=[1.0])
    with pytest.raises(ValueError, match=r"barrier: 'never' is not allowed; allowed: micro_step, step"):
        joint_plan([1, 1], 2, 100, barrier="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_ranks: 0 is not allowed"):
        joint_plan([1, 1], 0, 100)


def test_bins_with_seats_for_few_are_not_looked_at_for_each_row() -> None:
    """Rows of 1 to 3 sequences where 7 are the limit leave one or two seats in most of a thousand bins."""
    rng = np.random.default_rng(0)
    lengths, counts = np.minimum(rng.geometric(1e-3, 20_000), 60_000), rng.integers(1, 4, 20_000)
    begin = time.process_time()
    plan = joint_plan(lengths, 8, 65_536, max_sequences=7, counts=counts)
    assert time.process_time() - begin < 1
    assert cost_table(plan, counts, 8).max() <= 7
    assert plan.num_micro_steps <= 1.01 * counts.sum() / 7 / 8
