"""Pack and unpack, and what a token knows of its sequence: every implementation against what the operation means,
written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.kernels.packing import native_ragged, reference_ragged
from pekoe.kernels.packing.ragged import cumulative, pack, pack_fields, position_ids, sequence_index, unpack

RAGGED = pytest.mark.parametrize("implementation", [native_ragged, reference_ragged], ids=["native", "reference"])
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


@pytest.mark.kernels
def test_operators_keep_their_promises():
    """Schemas, gradients registered, shapes and dtypes of results that are not computed, sizes that are not known."""
    ops, cu = torch.ops.pekoe, torch.tensor([0, 3, 3, 7])
    starts = torch.tensor([1, 5, 0])
    padded = torch.randn(3, 5, 2, requires_grad=True)
    packed = torch.randn(7, 2, requires_grad=True)
    torch.library.opcheck(ops.pack, (padded, cu, None, 7))
    torch.library.opcheck(ops.pack, (padded, cu, starts, 7))
    torch.library.opcheck(ops.unpack, (packed, cu, None, 5, 0))
    torch.library.opcheck(ops.unpack, (packed, cu, starts, 5, 1.5))
    torch.library.opcheck(ops.position_ids, (cu, 7))
    torch.library.opcheck(ops.sequence_index, (cu, 7))
