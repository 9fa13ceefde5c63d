"""Shares of context parallelism: every token once, and the same cost on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.kernels.packing.ragged import cumulative, position_ids
from pekoe.kernels.packing.zigzag import zigzag_split


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 4))
def test_zigzag(lengths, num_ranks):
    cu = cumulative(lengths)
    split = zigzag_split(cu, num_ranks)
    total = int(cu[-1])
    flat = split.indices.reshape(-1)
    assert np.array_equal(np.sort(flat[flat >= 0]), np.arange(total))
    assert np.array_equal(flat[split.inverse], np.arange(total))
    assert np.array_equal(split.positions.reshape(-1)[split.inverse], position_ids(cu))
    assert np.array_equal(split.padded, num_ranks * split.cu_seqlens)
    for row, length in enumerate(lengths):
        own = slice(split.cu_seqlens[row], split.cu_seqlens[row + 1])
        size = own.stop - own.start
        assert size % 2 == 0
        assert 0 <= num_ranks * size - length < 2 * num_ranks
        for rank, positions in enumerate(split.positions[:, own]):
            chunk = size // 2
            early, late = rank * chunk, (2 * num_ranks - 1 - rank) * chunk
            assert positions.tolist() == [*range(early, early + chunk), *range(late, late + chunk)]
        pairs = split.positions[:, own].astype(np.int64).sum(axis=1)
        assert len(set(pairs.tolist())) <= 1, "causal attention costs every rank the same"


def test_a_split_over_no_ranks_is_refused():
    with pytest.raises(ValueError, match="num_ranks: 0"):
        zigzag_split([0, 3], 0)
