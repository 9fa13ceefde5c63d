"""Karmarkar-Karp and equal counts: every item in a part, loads balanced, the same from every implementation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.kernels.packing import reference
from pekoe.kernels.packing.packing import equal_count, karmarkar_karp

COSTS = st.one_of(
    st.lists(st.integers(0, 9).map(float), max_size=50),
    st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=50),
    st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3]), max_size=50),
)


def loads_of(parts: Any, costs: Any, num_parts: int) -> Any:
    assert parts.dtype == np.int64
    assert parts.shape == (len(costs),)
    assert not len(parts) or (parts.min() >= 0 and parts.max() < num_parts)
    return np.bincount(parts, weights=costs, minlength=num_parts)


def skewed(count: int, seed: int = 0) -> Any:
    return np.clip(np.random.default_rng(seed).lognormal(7, 0.8, count), 1, 16384).astype(np.int64)


@settings(max_examples=100, deadline=None)
@given(COSTS, st.integers(1, 9))
def test_karmarkar_karp_properties(values: list[float], num_parts: int) -> None:
    costs = np.array(values)
    parts = karmarkar_karp(costs, num_parts)
    loads = loads_of(parts, costs, num_parts)
    assert np.array_equal(parts, reference.karmarkar_karp(costs + 0.0, num_parts))
    assert (np.diff(loads) <= 1e-9 * costs.sum()).all(), "part 0 is the heaviest"
    assert loads.max() - loads.min() <= costs.max(initial=0) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(COSTS, st.integers(1, 9))
def test_equal_count_properties(values: list[float], num_parts: int) -> None:
    costs = np.array(values)
    parts = equal_count(costs, num_parts)
    loads_of(parts, costs, num_parts)
    assert np.array_equal(parts, reference.equal_count(costs + 0.0, num_parts))
    counts = np.bincount(parts, minlength=num_parts)
    assert counts.max() - counts.min() <= 1


def test_differencing_by_hand() -> None:
    """8 - 7, 6 - 5; then the differences 1 and 1 and the item 4: 4 - 1 = 3, 3 - 1 = 2."""
    assert karmarkar_karp([8, 7, 6, 5, 4], 2).tolist() == [1, 0, 1, 0, 0]
    assert karmarkar_karp([4, 4, 4, 4], 3).tolist() == [2, 1, 0, 0]


def test_items_that_cost_nothing_go_where_there_are_fewest() -> None:
    assert karmarkar_karp([0, 5, 0, 0], 3).tolist() == [1, 0, 2, 0]
    assert equal_count([0, 5, 0, 0], 3).tolist() == [1, 0, 2, 1]


def test_more_parts_than_items() -> None:
    assert karmarkar_karp([3, 9], 5).tolist() == [1, 0]
    assert equal_count([3, 9], 5).tolist() == [1, 0]


@pytest.mark.parametrize("num_parts", [2, 3])
def test_few_items_are_near_the_best_partition(num_parts: int) -> None:
    for seed in range(4):
        costs = skewed(8, seed)
        every = np.array(list(itertools.product(range(num_parts), repeat=8)))
        heaviest = max_loads(every, costs, num_parts)
        even = np.array([np.ptp(np.bincount(row, minlength=num_parts)) <= 1 for row in every])
        ours = loads_of(karmarkar_karp(costs, num_parts), costs, num_parts).max()
        assert ours <= 1.15 * heaviest.min()
        ours = loads_of(equal_count(costs, num_parts), costs, num_parts).max()
        assert ours <= 1.15 * heaviest[even].min()


def max_loads(every: Any, costs: Any, num_parts: int) -> Any:
    return np.stack([((every == part) * costs).sum(axis=1) for part in range(num_parts)]).max(axis=0)


def test_many_items_are_balanced() -> None:
    costs = skewed(10_000)
    loads = loads_of(karmarkar_karp(costs, 64), costs, 64)
    assert loads.max() - loads.min() <= 2
    few = skewed(1024)
    parts = equal_count(few, 64)
    loads = loads_of(parts, few, 64)
    assert (np.bincount(parts) == 16).all()
    assert loads.max() <= 1.001 * loads.mean()
    assert np.array_equal(parts, reference.equal_count(few.astype(float), 64))


@pytest.mark.parametrize("function", [karmarkar_karp, equal_count])
def test_wrong_arguments_are_named(function: Any) -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"costs: item 1 is {wrong}; allowed: finite and at least 0"):
            function([1.0, wrong], 2)
    with pytest.raises(ValueError, match=r"num_parts: 0 is not allowed; allowed: at least 1"):
        function([1.0], 0)
    assert function([-0.0, 0.0, 1.0], 1).tolist() == [0, 0, 0]
