"""Packing and unpacking in Triton's interpreter against their reference."""

from __future__ import annotations

import pytest
import torch

from pekoe.kernels.packing import reference_ragged, triton_ragged

LENGTHS = ((), (0,), (1,), (5, 0, 1, 37, 0, 16, 33))
DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64)


def content(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=draw).to(dtype)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_the_right", [False, True])
def test_pack_and_unpack(lengths: tuple[int, ...], dtype: torch.dtype, on_the_right: bool) -> None:
    longest = 1 + max(lengths, default=0)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    starts = longest - torch.tensor(lengths, dtype=torch.int64) if on_the_right else None
    for shape in ((), (3,), (2, 0)):
        padded = content(dtype, len(lengths), longest + 2, *shape)[:, :longest]
        packed = triton_ragged.pack(padded, bounds, starts, sum(lengths))
        assert torch.equal(packed, reference_ragged.pack(padded, bounds, starts, sum(lengths)))
        back = triton_ragged.unpack(packed, bounds, starts, longest, 1)
        assert torch.equal(back, reference_ragged.unpack(packed, bounds, starts, longest, 1))


def test_every_bit_of_a_nan_arrives() -> None:
    bits = torch.tensor([[0x7FC12345, 0x7F812345, -1]], dtype=torch.int32)
    packed = triton_ragged.pack(bits.view(torch.float32), torch.tensor([0, 3]), None, 3)
    assert torch.equal(packed.view(torch.int32), bits[0])


def test_a_row_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1: tokens 0 to 5 are not allowed in a row of 4"):
        triton_ragged.unpack(torch.zeros(7), torch.tensor([0, 2, 7]), None, 4, 0)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    for name in ("position_ids", "sequence_index"):
        found = getattr(triton_ragged, name)(bounds, sum(lengths))
        wanted = getattr(reference_ragged, name)(bounds, sum(lengths))
        assert found.dtype == torch.int32
        assert torch.equal(found, wanted)
