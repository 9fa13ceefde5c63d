"""Prefix tries and their block maps: every implementation against prefixes of samples and the mask written out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.kernels.packing import native_trie, reference_trie
from pekoe.kernels.packing.prefix_trie import block_map, prefix_trie
from pekoe.kernels.packing.ragged import cumulative, position_ids, sequence_index

TRIES = pytest.mark.parametrize("implementation", [native_trie, reference_trie], ids=["native", "reference"])


@TRIES
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=9), st.sampled_from([np.int32, np.int64]),
    st.integers(1, 5),
)  # fmt: skip
def test_tries_are_their_samples(implementation, samples, dtype, block):
    tokens = np.array([token for sample in samples for token in sample], dtype=dtype)
    cu = cumulative([len(sample) for sample in samples]).astype(np.int64)
    nodes, positions, ends, slots = implementation.prefix_trie(tokens, cu)
    assert nodes.dtype == dtype
    assert len(nodes) == len({tuple(sample[: i + 1]) for sample in samples for i in range(len(sample))})
    assert np.array_equal(nodes[slots], tokens)
    assert np.array_equal(positions[slots], position_ids(cu))
    numbers = np.arange(len(nodes))
    mask = (numbers[None, :] <= numbers[:, None]) & (numbers[:, None] < ends[None, :])
    for begin, end in pairwise(cu.tolist()):
        for i in range(begin, end):
            seen = np.flatnonzero(mask[slots[i]])
            assert seen.tolist() == slots[begin : i + 1].tolist(), "a node sees its own prefix and nothing else"
    offsets, keys, full = implementation.block_map(ends, block)
    listed = {(q, int(keys[at])): bool(full[at]) for q in range(len(offsets) - 1) for at in range(*offsets[q : q + 2])}
    for q in range(len(offsets) - 1):
        for k in range(len(offsets) - 1):
            tile = mask[q * block : (q + 1) * block, k * block : (k + 1) * block]
            assert listed.get((q, k)) == (bool(tile.all()) if tile.any() else None)


def test_children_follow_the_samples_and_long_edges_split():
    first = np.arange(1000, dtype=np.int32)
    second = np.concatenate([first[:777], np.array([5, 5], np.int32)])
    samples = [second[::-1], first, second, first[:300], first]
    trie = prefix_trie(np.concatenate(samples), cumulative([len(sample) for sample in samples]))
    assert len(trie.tokens) == 779 + 1000 + 2
    assert trie.tokens[:779].tolist() == second[::-1].tolist()
    assert trie.tokens[779:1779].tolist() == first.tolist()
    assert trie.subtree_end[[0, 779, 779 + 776, 779 + 777, 1779]].tolist() == [779, 1781, 1781, 1779, 1781]


def test_tensors_come_back_as_tensors():
    tokens = torch.tensor([1, 2, 3, 1, 2, 4])
    trie = prefix_trie(tokens, torch.tensor([0, 3, 6]))
    assert trie.tokens.tolist() == [1, 2, 3, 4]
    assert torch.equal(trie.tokens[trie.slots], tokens)
    blocks = block_map(trie, 2)
    assert blocks.offsets.tolist() == [0, 1, 3]
    assert blocks.keys.tolist() == [0, 0, 1]
    assert blocks.is_full.tolist() == [False, True, False]


def test_a_block_map_of_plain_sequences():
    cu = np.array([0, 4, 8])
    blocks = block_map(cu[1:][sequence_index(cu)], 2)
    assert blocks.keys.tolist() == [0, 0, 1, 2, 2, 3]
    assert blocks.is_full.tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("block", [3, 2**63 - 1, 2**70])
def test_a_block_may_be_larger_than_all_nodes(block):
    found = block_map(np.array([3, 2, 3]), block)
    assert (found.offsets.tolist(), found.keys.tolist(), found.is_full.tolist()) == ([0, 1], [0], [False])


def test_wrong_tries_are_named():
    for call, said in (
        (lambda: prefix_trie(np.zeros(2), [0, 2]), "tokens: float64"),
        (lambda: prefix_trie(np.zeros(2, np.int64), [0, 1]), "the last entry is 1"),
        (lambda: block_map(np.array([1, 2]), 0), "block: 0"),
        (lambda: block_map(np.array([1, 3]), 1), "subtree_end: 3 of node 1"),
        (lambda: block_map(np.array([1, 2**32 + 2]), 1), "subtree_end: 4294967298 of node 1"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
