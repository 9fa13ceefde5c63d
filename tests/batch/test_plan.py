"""The batch plan: every row once, within the budget, the same number of micro-batches on every rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.batch.plan import plan_batch


def rows_of(plan):
    return np.sort(np.concatenate([piece for rank in plan for minibatch in rank for piece in minibatch]))


def check(plan, lengths, ranks, max_tokens, max_sequences=None):
    assert len(plan) == ranks
    np.testing.assert_array_equal(rows_of(plan), np.arange(len(lengths)))
    counts = [[len(minibatch) for minibatch in rank] for rank in plan]
    assert all(count == counts[0] for count in counts)
    for rank in plan:
        for minibatch in rank:
            assert all(lengths[piece].sum() <= max_tokens for piece in minibatch)
            assert max_sequences is None or all(len(piece) <= max_sequences for piece in minibatch)
    for number in range(len(plan[0])):
        assert any(len(piece) for rank in plan for piece in rank[number]) or not len(lengths)


@st.composite
def batches(draw):
    granularity = draw(st.sampled_from([1, 1, 2]))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    groups = np.repeat(np.arange(len(sizes)) * 7, np.array(sizes) * granularity)
    lengths = np.array(draw(st.lists(st.integers(1, 50), min_size=len(groups), max_size=len(groups))))
    return lengths, groups, granularity


@settings(max_examples=200, deadline=None)
@given(
    batches(), st.integers(1, 5), st.integers(1, 4), st.integers(100, 200), st.sampled_from([None, 2, 3]), st.randoms()
)
def test_properties(batch, ranks, minibatches, budget, max_sequences, random):
    lengths, groups, granularity = batch
    plan = plan_batch(lengths, groups, ranks, budget, max_sequences, minibatches, granularity)
    check(plan, lengths, ranks, budget, max_sequences)
    assert len(plan[0]) == min(minibatches, len(lengths) // granularity)
    whole = len(np.unique(groups)) >= minibatches
    for number in range(len(plan[0])):
        rows = np.concatenate([piece for rank in plan for piece in rank[number]])
        if whole:
            for group in np.unique(groups[rows]):
                assert (groups[rows] == group).sum() == (groups == group).sum()
    for rank in plan:
        for piece in (piece for minibatch in rank for piece in minibatch):
            assert (piece.reshape(-1, granularity) // granularity == piece[::granularity, None] // granularity).all()


def test_uneven_ranks_get_equal_counts():
    """One rank would need 5 micro-batches of 100, the other 1."""
    lengths = np.array([95, 95, 95, 95, 95, 100])
    plan = plan_batch(lengths, np.zeros(6), 2, 100)
    check(plan, lengths, 2, 100)
    assert len(plan[0][0]) == 3


def test_more_ranks_than_rows():
    lengths = np.array([5, 5])
    plan = plan_batch(lengths, np.zeros(2), 4, 8)
    check(plan, lengths, 4, 8)
    assert [len(plan[rank][0]) for rank in range(4)] == [1, 1, 1, 1]


def test_bins_that_the_lower_bound_misses():
    lengths = np.full(8, 7)
    plan = plan_batch(lengths, np.zeros(8), 1, 8)
    assert len(plan[0][0]) == 8
    check(plan, lengths, 1, 8)


def test_balance_over_ranks():
    lengths = np.random.default_rng(0).integers(10, 400, 256)
    plan = plan_batch(lengths, np.repeat(np.arange(32), 8), 4, 4096)
    loads = [sum(lengths[piece].sum() for piece in rank[0]) for rank in plan]
    assert max(loads) - min(loads) < 0.02 * np.mean(loads)
    assert len(plan[0][0]) <= -(-max(loads) // 4096) + 1


def test_minibatches_hold_equal_numbers_of_groups_and_balanced_tokens():
    lengths = np.random.default_rng(1).integers(10, 400, 64)
    groups = np.repeat(np.arange(16), 4)
    plan = plan_batch(lengths, groups, 2, 4096, minibatches=4)
    tokens = []
    for number in range(4):
        rows = np.concatenate([piece for rank in plan for piece in rank[number]])
        assert len(np.unique(groups[rows])) == 4
        tokens.append(lengths[rows].sum())
    assert max(tokens) < 1.2 * min(tokens)


def test_pairs_stay_together():
    lengths = np.array([40, 40, 10, 10, 40, 40])
    plan = plan_batch(lengths, np.zeros(6), 2, 100, granularity=2)
    check(plan, lengths, 2, 100)
    assert sorted(tuple(piece) for rank in plan for piece in rank[0]) == [(0, 1, 2, 3), (4, 5)]


def test_row_over_the_budget_is_named():
    with pytest.raises(ValueError, match=r"row 2 of group 9 has 101 tokens, more than 100"):
        plan_batch(np.array([1, 2, 101]), np.array([8, 8, 9]), 1, 100)
    with pytest.raises(ValueError, match=r"rows 2\.\.3 of group 9 has 110 tokens"):
        plan_batch(np.array([1, 2, 60, 50]), np.array([8, 8, 9, 9]), 1, 100, granularity=2)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="granularity: 2 does not divide 3 rows"):
        plan_batch(np.array([1, 2, 3]), np.zeros(3), 1, 100, granularity=2)
    with pytest.raises(ValueError, match=r"rows 0\.\.1 stay together"):
        plan_batch(np.array([1, 2]), np.array([0, 1]), 1, 100, granularity=2)
    with pytest.raises(ValueError, match="groups: 1 numbers for 2 rows"):
        plan_batch(np.array([1, 2]), np.array([0]), 1, 100)


def test_no_rows():
    assert plan_batch(np.zeros(0, int), np.zeros(0, int), 2, 100) == [[], []]


def test_large_batch_is_quick():
    lengths = np.random.default_rng(0).integers(10, 8000, 8192)
    start = time.process_time()
    plan = plan_batch(lengths, np.repeat(np.arange(1024), 8), 64, 16384, minibatches=4)
    assert time.process_time() - start < 2
    check(plan, lengths, 64, 16384)


@st.composite
def shared_prompts(draw):
    """Groups of rows whose first tokens are the same."""
    granularity = draw(st.sampled_from([1, 1, 2]))
    sizes = [granularity * size for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))]
    groups = np.repeat(np.arange(len(sizes)) * 3, sizes)
    shared = np.repeat(draw(st.lists(st.integers(0, 30), min_size=len(sizes), max_size=len(sizes))), sizes)
    own = np.array(draw(st.lists(st.integers(1, 35), min_size=len(groups), max_size=len(groups))))
    return shared + own, shared, groups, granularity


@settings(max_examples=150, deadline=None)
@given(shared_prompts(), st.integers(1, 4), st.integers(1, 3), st.integers(100, 250), st.sampled_from([None, 2, 5]))
def test_groups_stay_together(batch, ranks, minibatches, budget, max_sequences):
    lengths, shared, groups, granularity = batch
    plan = plan_batch(
        lengths,
        groups,
        ranks,
        budget,
        max_sequences,
        minibatches,
        granularity,
        shared_tokens=shared,
    )
    np.testing.assert_array_equal(rows_of(plan), np.arange(len(lengths)))
    pieces = [piece for rank in plan for minibatch in rank for piece in minibatch]
    homes = np.zeros(len(lengths), int)
    for number, piece in enumerate(pieces):
        homes[piece] = number
        assert max_sequences is None or len(piece) <= max_sequences
        own = (lengths - shared)[piece].sum()
        assert own + sum(shared[piece][groups[piece] == group].max() for group in np.unique(groups[piece])) <= budget
    for number in range(len(plan[0])):
        chosen = np.sort(np.concatenate([piece for rank in plan for piece in rank[number]]))
        for group in np.unique(groups[chosen]):
            rows = chosen[groups[chosen] == group]
            fits = (lengths - shared)[rows].sum() + shared[rows].max() <= budget
            if fits and (max_sequences is None or len(rows) <= max_sequences):
                assert len(np.unique(homes[rows])) == 1
            assert (homes[rows].reshape(-1, granularity) == homes[rows][::granularity, None]).all()


def test_a_group_over_the_budget_is_cut_into_runs_of_rows():
    lengths, groups = np.array([40, 40, 40, 40, 40, 15]), np.array([0, 0, 0, 0, 0, 1])
    plan = plan_batch(lengths, groups, 1, 100, shared_tokens=np.zeros(6, int))
    assert sorted(tuple(piece) for piece in plan[0][0]) == [(0, 1), (2, 3), (4, 5)]
    # The first 30 tokens are held once: 30 + 5 * 10 + 15 fit together.
    plan = plan_batch(lengths, groups, 1, 100, shared_tokens=np.array([30] * 5 + [0]))
    assert [list(piece) for piece in plan[0][0]] == [[0, 1, 2, 3, 4, 5]]


def test_shared_tokens_that_cannot_be_are_named():
    with pytest.raises(ValueError, match="shared_tokens: row 1 shares 5 of 4 tokens"):
        plan_batch(np.array([3, 4]), np.zeros(2), 1, 100, shared_tokens=np.array([1, 5]))
    assert plan_batch(np.zeros(0, int), np.zeros(0, int), 2, 100, shared_tokens=np.zeros(0, int)) == [[], []]


def test_ranks_wait_little_for_each_other():
    lengths = np.clip(np.random.default_rng(0).lognormal(7.5, 0.8, 2048), 1, 16384).astype(int)
    plan = plan_batch(lengths, np.repeat(np.arange(256), 8), 16, 16384, minibatches=2)
    check(plan, lengths, 16, 16384)
    for number in range(2):
        tokens = np.array([[lengths[piece].sum() for piece in rank[number]] for rank in plan])
        assert tokens.max(axis=0).sum() <= 1.01 * tokens.sum() / 16
        assert tokens.shape[1] == -(-tokens.sum() // (16 * 16384))
