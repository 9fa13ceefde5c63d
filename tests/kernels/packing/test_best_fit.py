"""Best fit decreasing: nothing over its capacity, few bins, the same from every implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pekoe.kernels.packing import native, reference
from pekoe.kernels.packing.packing import UNLIMITED, best_fit


def check(bins: Any, lengths: Any, capacity: int, max_items: int | None = None) -> int:
    """Every item in a bin, no bin over its limits; the number of bins."""
    assert bins.dtype == np.int64
    assert bins.shape == (len(lengths),)
    assert np.array_equal(np.unique(bins), np.arange(bins.max(initial=-1) + 1)), "bins are numbered without gaps"
    assert (np.bincount(bins, weights=lengths) <= capacity).all()
    assert max_items is None or (np.bincount(bins) <= max_items).all()
    return int(bins.max(initial=-1)) + 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=60), st.integers(0, 200), st.sampled_from([None, 1, 2, 5]))
@example([], 100, None)
@example([0, 0, 0], 0, None)
@example([100] * 7, 0, 3)
def test_properties(sizes: list[int], spare: int, max_items: int | None) -> None:
    lengths = np.array(sizes, dtype=np.int64)
    capacity = int(lengths.max(initial=0)) + spare
    bins = best_fit(lengths, capacity, max_items)
    num_bins = check(bins, lengths, capacity, max_items)
    assert np.array_equal(bins, reference.best_fit(lengths, capacity, max_items or UNLIMITED))
    loads = np.bincount(bins, weights=lengths)
    if max_items is None and num_bins > 1:
        assert np.sort(loads)[:2].sum() > capacity, "two bins that could be one"
    by_length = bins[np.argsort(-lengths, kind="stable")]
    assert (by_length <= np.maximum.accumulate(np.append(-1, by_length))[:-1] + 1).all(), "numbered as they are opened"


def test_the_fullest_bin_with_room_takes_an_item() -> None:
    """60 and 50 open bins; 40 fills the first, 30 and 20 the second."""
    assert best_fit([50, 20, 60, 40, 30], 100).tolist() == [1, 1, 0, 0, 1]


def test_equal_bins_are_filled_by_number_and_equal_items_by_index() -> None:
    assert best_fit([7, 7, 7, 3, 3, 3], 10).tolist() == [0, 1, 2, 0, 1, 2]
    assert best_fit([5, 5, 5, 5], 10).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("capacity", [8192, 1 << 20, (1 << 27) + 11])
@pytest.mark.parametrize("kind", ["log-normal", "uniform", "constant", "bimodal", "longest"])
def test_many_items_of_large_bins(kind: str, capacity: int) -> None:
    numbers = np.random.default_rng(0)
    count = 3000
    lengths = {
        "log-normal": np.clip(numbers.lognormal(np.log(capacity / 16), 1.0, count), 1, capacity).astype(np.int64),
        "uniform": numbers.integers(0, capacity + 1, count),
        "constant": np.full(count, capacity // 5),
        "bimodal": np.where(numbers.random(count) < 0.7, capacity // 50, capacity // 2 + 1),
        "longest": np.full(count, capacity),
    }[kind]
    bins = best_fit(lengths, capacity)
    num_bins = check(bins, lengths, capacity)
    assert np.array_equal(bins, reference.best_fit(lengths, capacity, UNLIMITED))
    lowest = max(-(-int(lengths.sum()) // capacity), int((lengths > capacity // 2).sum()))
    assert num_bins <= lowest * (1.002 if kind == "log-normal" else 1.02)


def test_bins_too_large_for_a_set_of_rooms() -> None:
    lengths = np.array([3 << 28, 1, 2 << 28, 2 << 28], dtype=np.int64)
    assert native.best_fit(lengths, 4 << 28, UNLIMITED).tolist() == [0, 0, 1, 1]
    assert best_fit(lengths, 1 << 70).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["int32", "uint8", "list", "tensor", "strided"])
def test_what_holds_the_lengths_does_not_matter(kind: str) -> None:
    lengths: Any = [50, 20, 60, 40, 30]
    if kind == "tensor":
        lengths = torch.tensor(lengths, dtype=torch.int32)
    elif kind == "strided":
        lengths = np.repeat(lengths, 2)[::2]
    elif kind != "list":
        lengths = np.array(lengths, dtype=kind)
    assert best_fit(lengths, 100).tolist() == [1, 1, 0, 0, 1]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"capacity: item 1 has 101 tokens, more than 100"):
        best_fit([3, 101, 200], 100)
    with pytest.raises(ValueError, match=r"capacity: item 0 has 0 tokens, more than -1"):
        best_fit([0], -1)
    assert best_fit([], -1).tolist() == []
    with pytest.raises(ValueError, match=r"lengths: item 2 is -1; allowed: at least 0"):
        best_fit([3, 1, -1], 100)
    with pytest.raises(ValueError, match=r"lengths: float64 is not allowed; allowed: whole numbers"):
        best_fit([0.5], 100)
    with pytest.raises(ValueError, match=r"lengths: 2 dimensions are not allowed"):
        best_fit([[1, 2]], 100)
    with pytest.raises(ValueError, match=r"max_items: 0 is not allowed; allowed: at least 1"):
        best_fit([1], 100, 0)
    with pytest.raises(ValueError, match=r"lengths: a sum of 2\.31e\+18 is not allowed"):
        best_fit([1 << 60, 1 << 60], 1 << 61)
