"""The sequence room's Triton kernels in the interpreter against their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pekoe.kernels.sequence import reference, triton_sequence

DTYPES = (torch.float32,) if triton_sequence.IS_ASCEND else (torch.float32, torch.float64)
LENGTHS = ((), (0,), (1,), (5, 0, 1, 37, 0, 16, 33), (0, 131, 2))


def bounds_of(lengths: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    tolerance = 1e-12 if wanted.dtype == torch.float64 else 1e-5 if triton_sequence.IS_ASCEND else 1e-6
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("with_turns", [False, True])
@pytest.mark.parametrize(
    ("with_values", "with_bootstrap"), [(True, True), (True, False), (False, False), (False, True)]
)
def test_gae(lengths: tuple[int, ...], with_turns: bool, with_values: bool, with_bootstrap: bool) -> None:
    draw = torch.Generator().manual_seed(sum(lengths))
    count, dtype = sum(lengths), DTYPES[-1] if with_bootstrap else DTYPES[0]
    mask = torch.rand(count, generator=draw) < 0.7
    mask[: count // 3] &= torch.rand(count // 3, generator=draw) < 0.05
    rewards = torch.randn(count, generator=draw, dtype=dtype)
    values = torch.randn(count, generator=draw, dtype=dtype)
    rewards[~mask] = torch.nan
    lambdas = torch.rand(len(lengths), generator=draw, dtype=torch.float64)
    lambdas[::3] = 0
    turns = (torch.arange(count) // 3 + torch.randint(0, 2, (count,), generator=draw)) // 2
    arguments = (
        rewards, values if with_values else None, mask, bounds_of(lengths), 0.97, lambdas,
        turns if with_turns else None, torch.randn(len(lengths), generator=draw) if with_bootstrap else None,
    )  # fmt: skip
    for found, wanted in zip(triton_sequence.gae(*arguments), reference.gae(*arguments), strict=True):
        assert_near(found, wanted)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("from_left", [False, True])
def test_discounted_sums(lengths: tuple[int, ...], from_left: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    for dtype in DTYPES:
        values = torch.randn(2 * sum(lengths), generator=draw, dtype=dtype)[::2]
        decay = 1.4 * torch.rand(len(lengths), generator=draw) - 0.4
        decay[1::2] = 0
        arguments = (values, decay, bounds_of(lengths, torch.int32), from_left)
        assert_near(triton_sequence.discounted_sums(*arguments), reference.discounted_sums(*arguments))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("with_mask", [False, True])
def test_segments(lengths: tuple[int, ...], with_mask: bool) -> None:
    draw = torch.Generator().manual_seed(4)
    for dtype in DTYPES:
        values = torch.randn(sum(lengths), generator=draw, dtype=dtype)
        mask = (torch.rand(sum(lengths), generator=draw) < 0.3).to(torch.uint8) * 7
        if with_mask:
            values[mask == 0] = torch.nan
        for name in ("segment_sum", "segment_mean"):
            arguments = (values, mask if with_mask else None, bounds_of(lengths))
            assert_near(getattr(triton_sequence, name)(*arguments), getattr(reference, name)(*arguments))


def test_a_sequence_gets_the_same_bits_whatever_else_is_packed() -> None:
    draw = torch.Generator().manual_seed(5)
    values, decay = torch.randn(70, generator=draw), torch.tensor([0.9])
    alone = triton_sequence.discounted_sums(values[30:], decay, torch.tensor([0, 40]), False)
    together = triton_sequence.discounted_sums(values, decay.expand(2), torch.tensor([0, 30, 70]), False)
    assert torch.equal(together[30:], alone)
