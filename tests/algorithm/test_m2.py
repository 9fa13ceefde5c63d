"""M2PO's cut over all ranks, against sorting everything in one place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import on_ranks, packed, trajectory

from pekoe.pipeline.algorithm.m2 import add_m2_keep
from pekoe.pipeline.algorithm.reduction import OneRank
from pekoe.pipeline.records import Finish


def batch_of(gaps, mask=None, finish=Finish.STOP):
    """One sequence, behaviour log-probs -1, proximal ones off by `gaps`."""
    mask = [0, *([1] * len(gaps) if mask is None else mask)]
    row = trajectory(mask, finish=finish)
    return packed((0, row), prox_logprobs=-1.0 + np.array([0, *gaps]))


def keep_of(gaps, threshold=0.04, **options):
    batch = batch_of(gaps, **options)
    add_m2_keep([batch], threshold, OneRank())
    return batch.extra["m2_keep"][1:].tolist()


def test_the_largest_go_until_the_mean_of_the_rest_is_below():
    """Squares .01, .09, 4, .0025: the mean of all but the 4 is .0342, below .04."""
    assert keep_of([0.1, -0.3, 2.0, 0.05]) == [1, 1, 0, 1]
    assert keep_of([0.1, -0.3, 2.0, 0.05], threshold=0.03) == [1, 0, 0, 1]
    assert keep_of([0.1, -0.3, 2.0, 0.05], threshold=2.0) == [1, 1, 1, 1]


def test_the_bound_is_strict():
    assert keep_of([0.5, 0.25], threshold=0.15625) == [0, 1]
    assert keep_of([0.5, 0.25], threshold=0.1563) == [1, 1]


def test_the_smallest_is_kept_where_nothing_is_below():
    assert keep_of([1.0, -0.5, 2.0]) == [0, 1, 0]
    assert keep_of([0.75]) == [1]


def test_equal_moments_go_together():
    """With one of the two .25s the mean would be below the threshold; which one would be left to the order."""
    assert keep_of([0.5, 0.0, -0.5], threshold=0.15) == [0, 1, 0]
    assert keep_of([0.5, 0.5]) == [1, 1]


def test_masked_and_truncated_tokens_have_no_vote_and_nothing_is_kept_of_them():
    assert keep_of([0.1, 0.0, 0.3], mask=[1, 0, 1], threshold=0.05) == [1, 0, 0]
    batches = [batch_of([0.3, 0.1]), batch_of([0.0] * 5, finish=Finish.LENGTH)]
    add_m2_keep(batches, 0.04, OneRank(), mask_truncated=True)
    assert [b.extra["m2_keep"].tolist() for b in batches] == [[0, 0, 1], [0] * 6]
    add_m2_keep(batches, 0.04, OneRank())
    assert [b.extra["m2_keep"].tolist() for b in batches] == [[0, 1, 1], [0, 1, 1, 1, 1, 1]]


def test_extremes():
    assert keep_of([np.inf, 1e200, 0.0]) == [0, 0, 1]
    assert keep_of([1e-9, 1e-8], threshold=1e-3) == [1, 1]
    assert keep_of([0.0] * 3) == [1, 1, 1]
    add_m2_keep([], 0.04, OneRank())
    with pytest.raises(ValueError, match="prox_logprobs"):
        add_m2_keep([packed((0, trajectory([0, 1])))], 0.04, OneRank())


def expected_cut(gaps, threshold):
    """The largest square that is kept, from all squares sorted; equal ones together."""
    squares = np.sort(np.square(gaps))
    ends = [i + 1 for i in range(len(squares)) if i + 1 == len(squares) or squares[i + 1] > squares[i]]
    fitting = [end for end in ends if squares[:end].mean() < threshold]
    return squares[fitting[-1] - 1] if fitting else squares[0]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 21, 34, 55]), min_size=1, max_size=30),
    st.integers(1, 3),
    st.randoms(),
    st.sampled_from([0.001, 0.041, 0.37, 3.3]),
)
def test_any_order_and_cut_into_ranks_keeps_the_same_tokens(eighths, num_ranks, random, threshold):
    gaps = [number / 8 for number in eighths]
    cut = expected_cut(gaps, threshold)
    random.shuffle(gaps)
    parts = [gaps[rank::num_ranks] for rank in range(num_ranks)]

    def job(rank, over):
        batches = [batch_of(parts[rank][:2]), batch_of(parts[rank][2:])] if parts[rank] else []
        add_m2_keep(batches, threshold, over)
        assert getattr(over, "num_calls", 0) <= 12
        return [b.extra["m2_keep"][1:].tolist() for b in batches]

    for part, kept in zip(parts, on_ranks(num_ranks, job), strict=True):
        assert list(itertools.chain(*kept)) == [int(gap**2 <= cut) for gap in part]
