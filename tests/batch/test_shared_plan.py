"""Plans of groups that share their beginning: within the budget by what is computed, whole where that is best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.batch.plan import plan_batch
from pekoe.pipeline.batch.shared_plan import longest_path, num_computed, plan_shared

GROUPS = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=7
)
"""Tokens in common, and those of each row behind them."""


def laid_out(groups):
    """(lengths, group numbers, shared)"""
    lengths = [common + own for common, rows in groups for own in rows]
    numbers = [number for number, (_, rows) in enumerate(groups) for _ in rows]
    shared = [common for common, rows in groups for _ in rows]
    return tuple(np.array(values, dtype=np.int64) for values in (lengths, numbers, shared))


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, ranks=st.integers(1, 3), minibatches=st.integers(1, 3), most=st.sampled_from([None, 1, 3]))
def test_every_row_lies_once_within_the_budget(groups, ranks, minibatches, most):
    rows = laid_out(groups)
    plan = plan_shared(*rows, ranks, 60, most, minibatches)
    pieces = [piece for minibatches in plan for micro_batches in minibatches for piece in micro_batches]
    assert sorted(np.concatenate(pieces).tolist()) == list(range(len(rows[0])))
    assert len({tuple(len(micro_batches) for micro_batches in of_rank) for of_rank in plan}) == 1
    for piece in pieces:
        assert num_computed(piece, *rows) <= 60
        assert most is None or len(piece) <= most
        assert sorted(piece.tolist()) == piece.tolist()


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, ranks=st.integers(1, 3), minibatches=st.integers(1, 5))
def test_updates_are_of_the_same_rows_as_without_sharing(groups, ranks, minibatches):
    """Also where there are fewer groups than minibatches."""
    lengths, numbers, shared = laid_out(groups)
    plain = plan_batch(lengths, numbers, ranks, 60, None, minibatches)
    plan = plan_shared(lengths, numbers, shared, ranks, 60, None, minibatches)
    for made in (plain, plan):
        assert len(made[0]) == min(minibatches, len(lengths))
    for number in range(len(plain[0])):
        rows = [sorted(int(row) for rank in made for piece in rank[number] for row in piece) for made in (plain, plan)]
        assert rows[0] == rows[1]


def test_a_group_larger_than_the_budget_stays_whole_when_what_it_shares_counts_once():
    rows = laid_out([(400, [50] * 8), (400, [20] * 8)])
    plan = plan_shared(*rows, 1, 800)
    assert [piece.tolist() for piece in plan[0][0]] == [[*range(8)], [*range(8, 16)]]


def test_few_groups_are_cut_for_many_ranks_and_many_are_not():
    few = laid_out([(10, [100] * 8)])
    plan = plan_shared(*few, 4, 1000)
    assert longest_path(plan, *few) == 210
    assert [len(of_rank[0][0]) for of_rank in plan] == [2, 2, 2, 2]
    many = laid_out([(100, [10] * 4)] * 8)
    plan = plan_shared(*many, 2, 1000)
    assert longest_path(plan, *many) == 4 * 140
    assert all(len(set(many[1][piece])) * 4 == len(piece) for of_rank in plan for piece in of_rank[0])


def test_rows_that_stay_together_and_too_long_ones_are_as_ever():
    rows = laid_out([(5, [1, 1, 1, 1])])
    plan = plan_shared(*rows, 2, 100, granularity=2)
    assert [of_rank[0][0].tolist() for of_rank in plan] in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])
    with pytest.raises(ValueError, match="row 0 of group 0 has 31 tokens, more than 30"):
        plan_shared(*laid_out([(30, [1, 1])]), 2, 30)
    assert plan_shared(*laid_out([]), 2, 30) == [[], []]
