"""Pack and unpack, what a token knows of its sequence, zigzag shares, prefix tries and their block maps: every
implementation against what the operation means, written out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.kernels.packing import native_ragged, native_trie, reference_ragged, reference_trie
from pekoe.kernels.packing.prefix_trie import block_map, prefix_trie
from pekoe.kernels.packing.ragged import cumulative, pack, pack_fields, position_ids, sequence_index, unpack
from pekoe.kernels.packing.zigzag import zigzag_split

RAGGED = pytest.mark.parametrize("implementation", [native_ragged, reference_ragged], ids=["native", "reference"])
TRIES = pytest.mark.parametrize("implementation", [native_trie, reference_trie], ids=["native", "reference"])
DTYPES = (np.bool_, np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64, np.complex128)


@RAGGED
@pytest.mark.parametrize("inner", [(), (3,), (2, 0), (2, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_and_unpack_are_boolean_masks(implementation, inner, dtype):
    numbers = np.random.default_rng(0)
    lengths, length = np.array([3, 0, 7, 1, 4]), 7
    padded = (100 * numbers.random((5, length, *inner))).astype(dtype)
    cu = cumulative(lengths)
    for starts in (None, length - lengths, np.array([4, 7, 0, 3, 1])):
        begins = 0 if starts is None else starts[:, None]
        mask = (np.arange(length) >= begins) & (np.arange(length) < begins + lengths[:, None])
        packed = implementation.pack(padded, cu.astype(np.int64), starts, 15)
        assert packed.dtype == dtype
        assert np.array_equal(packed, padded[mask])
        back = implementation.unpack(packed, cu.astype(np.int64), starts, length, 1)
        expected = np.ones_like(padded)
        expected[mask] = packed
        assert back.dtype == dtype
        assert np.array_equal(back, expected)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 3), st.integers(0, 2**20))
def test_there_and_back(lengths, spare, seed):
    length = max(lengths, default=0) + spare
    packed = np.random.default_rng(seed).normal(size=(sum(lengths), 2))
    padded = unpack(packed, cumulative(lengths), length, fill=np.nan)
    assert padded.shape == (len(lengths), length, 2)
    assert np.isnan(padded).sum() == 2 * (len(lengths) * length - sum(lengths))
    assert np.array_equal(pack(padded, lengths), packed)
    tensors = unpack(torch.from_numpy(packed), cumulative(lengths), length, fill=np.nan)
    assert np.array_equal(tensors.numpy(), padded, equal_nan=True)
    assert torch.equal(pack(tensors, lengths), torch.from_numpy(packed))


def test_slices_and_turned_arrays_go_in():
    wide = np.arange(2 * 5 * 6 * 3).reshape(5, 12, 3)
    lengths = [2, 4, 0, 4, 1]
    for view in (wide[:, 3:7], wide[::-1, :4], wide[:, ::3], wide.transpose(0, 2, 1)[:, :, :4].transpose(0, 2, 1)):
        expected = np.concatenate([row[:length] for row, length in zip(view, lengths, strict=True)])
        assert np.array_equal(pack(view, lengths), expected)
        tensor = torch.from_numpy(np.ascontiguousarray(view)).transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(pack(tensor, lengths), torch.from_numpy(expected))
    packed = torch.arange(22.0).reshape(2, 11).t()
    assert torch.equal(unpack(packed, cumulative(lengths), 4), unpack(packed.contiguous(), cumulative(lengths), 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int32])
def test_dtypes_of_torch(dtype):
    padded = torch.arange(24).reshape(2, 4, 3).to(dtype)
    packed = pack(padded, torch.tensor([1, 3]), torch.tensor([3, 1]))
    assert packed.dtype == dtype
    assert torch.equal(packed, torch.cat([padded[0, 3:], padded[1, 1:]]))
    assert torch.equal(unpack(packed, torch.tensor([0, 1, 4]), fill=1)[0, 1:], torch.ones(2, 3, dtype=dtype))


def test_fields_share_their_boundaries():
    fields: dict[str, Any] = {"tokens": np.arange(6).reshape(2, 3), "logprobs": np.zeros((2, 3), np.float32)}
    packed = pack_fields(fields, [1, 2])
    assert packed["tokens"].tolist() == [0, 3, 4]
    assert packed["logprobs"].dtype == np.float32
    with pytest.raises(ValueError, match="logprobs"):
        pack_fields(fields | {"logprobs": np.zeros((3, 3))}, [1, 2])
    assert pack_fields({"x": torch.eye(2)}, [1, 0])["x"].tolist() == [1]


@pytest.mark.kernels
def test_each_is_the_others_gradient():
    lengths, starts = torch.tensor([2, 0, 3]), torch.tensor([1, 3, 0])
    cu = cumulative(lengths)
    padded = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    packed = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    for checked in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert checked(lambda x: pack(x, lengths, starts), padded)
        assert checked(lambda x: unpack(x, cu, 3, 7, starts), packed)
    left = (pack(padded, lengths, starts) * packed).sum()
    right = (padded * unpack(packed, cu, 3, 0, starts)).sum()
    assert torch.allclose(left, right)


@pytest.mark.kernels
def test_torch_compile_traces_all_of_it():
    lengths = torch.tensor([2, 0, 3])

    def loss(padded: torch.Tensor) -> torch.Tensor:
        packed = pack(padded, lengths, num_tokens=5)
        cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        weights = position_ids(cu, 5) + 10 * sequence_index(cu, 5)
        return (unpack(packed * weights[:, None], cu, 4, 1) ** 2).sum()

    plain, traced = (torch.linspace(-1, 1, 24).reshape(3, 4, 2).requires_grad_() for _ in range(2))
    loss(plain).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(traced).backward()
    assert torch.equal(plain.grad, traced.grad)


@RAGGED
@pytest.mark.parametrize("lengths", [[], [0], [5], [3, 0, 0, 4, 1], [1] * 40])
def test_what_a_token_knows(implementation, lengths):
    cu = cumulative(lengths).astype(np.int64)
    positions = [i for length in lengths for i in range(length)]
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    for numbers in (cu, torch.from_numpy(cu)):
        assert implementation.position_ids(numbers, sum(lengths)).tolist() == positions
        assert implementation.sequence_index(numbers, sum(lengths)).tolist() == rows
    assert position_ids(cumulative(lengths)).dtype == np.int32
    assert sequence_index(torch.from_numpy(cu)).dtype == torch.int32


def test_what_does_not_fit_is_named():
    x = np.zeros((2, 3))
    for call, said in (
        (lambda: pack(x, [3, 4]), "sequence 1: tokens 0 to 4 are not allowed in a row of 3"),
        (lambda: pack(x, [3, 2], [1, 1]), "sequence 0: tokens 1 to 4"),
        (lambda: pack(x, [1, 1], [0, -1]), "sequence 1: tokens -1 to 0"),
        (lambda: pack(x, [1, -1]), "lengths: -1 of sequence 1"),
        (lambda: pack(x, [1]), r"padded: \(2, 3\)"),
        (lambda: pack(x, [1.5, 1]), "lengths: float64"),
        (lambda: cumulative([2**31]), "lengths: 2147483648 tokens are not allowed; up to 2147483647"),
        (lambda: cumulative([2**62] * 4), "lengths: 18446744073709551616 tokens"),
        (lambda: pack(x.astype(object), [1, 1]), "padded: object is not allowed"),
        (lambda: unpack(x.astype(object), [0, 2]), "packed: object is not allowed"),
        (lambda: pack(x, [1, 1], [0]), "starts: 1 entries"),
        (lambda: pack(torch.zeros(2, 3), [3, 4]), "sequence 1: tokens 0 to 4"),
        (lambda: pack(torch.zeros(2, 3), [1, 1], num_tokens=3), "the last entry is 2 where there are 3"),
        (lambda: pack(torch.zeros(2), [1, 1]), r"padded: \(2,\)"),
        (lambda: unpack(x, [0, 2], 1), "sequence 0: tokens 0 to 2"),
        (lambda: unpack(x, [0, 1], 1), "the last entry is 1 where there are 2"),
        (lambda: unpack(x, [1, 2], 1), "the first entry is 0"),
        (lambda: unpack(torch.zeros(3), torch.tensor([0, 2, 1, 3])), "sequence 1 ends at 1"),
        (lambda: position_ids(np.array([0, 5, 3])), "sequence 1 ends at 3, before its start at 5"),
        (lambda: sequence_index(torch.tensor([], dtype=torch.int64)), "cu_seqlens"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


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
        (lambda: zigzag_split([0, 3], 0), "num_ranks: 0"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
