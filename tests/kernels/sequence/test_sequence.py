"""Scans and sums inside packed sequences: closed forms, every implementation against the recurrence written out, what a
caller can do wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.kernels.sequence import native, reference
from pekoe.kernels.sequence.sequence import discounted_sums, gae, segment_mean, segment_sum

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [native, reference], ids=["native", "reference"])


def boundaries(lengths: Any) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)


def plain_gae(rewards, values, mask, turns, discount, decay, end):
    """One sequence, timestep by timestep."""
    steps: list[list[int]] = []
    for i in np.flatnonzero(mask):
        if turns is not None and steps and turns[steps[-1][0]] == turns[i]:
            steps[-1].append(i)
        else:
            steps.append([i])
    advantages, returns, running, following = np.zeros(len(rewards)), np.array(values, dtype=float), 0.0, end
    for step in reversed(steps):
        value = values[step[0]]
        running = sum(rewards[i] for i in step) + discount * following - value + decay * running
        following = value
        advantages[step], returns[step] = running, running + value
    return advantages, returns


@IMPLEMENTATIONS
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400) | st.integers(0, 9), max_size=5),
    by_turn=st.booleans(),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    critic=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_gae_is_the_recurrence(implementation, lengths, by_turn, share, critic, seed):
    numbers = np.random.default_rng(seed)
    size, cu_seqlens = sum(lengths), boundaries(lengths)
    mask = numbers.random(size) < share
    rewards = np.where(mask, numbers.normal(size=size), np.nan)
    values = np.where(mask, numbers.normal(size=size), 1e30) if critic else np.zeros(size)
    turns = np.cumsum(numbers.random(size) < 0.2) if by_turn else None
    lambdas, end = numbers.random(len(lengths)), numbers.normal(size=len(lengths))
    got = implementation.gae(
        torch.tensor(rewards), torch.tensor(values) if critic else None, torch.tensor(mask), cu_seqlens, 0.9,
        torch.tensor(lambdas), None if turns is None else torch.tensor(turns), torch.tensor(end),
    )  # fmt: skip
    for row, (begin, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        part = slice(begin, stop)
        expected = plain_gae(
            rewards[part], values[part], mask[part], None if turns is None else turns[part], 0.9, 0.9 * lambdas[row],
            end[row],
        )  # fmt: skip
        for found, wanted in zip(got, expected, strict=True):
            np.testing.assert_allclose(found[part].numpy(), wanted, rtol=1e-12, atol=1e-11)


def test_the_numbers_of_the_definition():
    cu, ones = torch.tensor([0, 4]), torch.ones(4, dtype=torch.bool)
    turns = torch.tensor([0, 0, 1, 1])
    advantages, _ = gae(torch.tensor([0.0, 1, 0, 2]), None, ones, cu, lam=0.5, turns=turns)
    assert advantages.tolist() == [2, 2, 2, 2]
    advantages, returns = gae(
        torch.tensor([0.0, 3, 0, 0, 4]), torch.tensor([1.0, 5, 9, 2, 8]), torch.tensor([1, 1, 0, 1, 1]),
        torch.tensor([0, 5]), discount=0.5, lam=0.25, turns=torch.tensor([0, 0, -1, 2, 2]),
        bootstrap=torch.tensor([8.0]),
    )  # fmt: skip
    assert advantages.tolist() == [3.75, 3.75, 0, 6, 6]
    assert returns.tolist() == [4.75, 4.75, 9, 8, 8]
    advantages, _ = gae(
        torch.tensor([0.0, 0, 1, 0] * 2), None, torch.tensor([1, 1, 1, 0] * 2), torch.tensor([0, 4, 8]), lam=[0.5, 0.0]
    )
    assert advantages.tolist() == [0.25, 0.5, 1, 0, 0, 0, 1, 0]


def test_singles_are_within_a_hundred_thousandth_of_doubles():
    numbers = np.random.default_rng(0)
    rewards, values = numbers.normal(size=(2, 50_000))
    mask, cu = numbers.random(50_000) < 0.7, boundaries([20_000, 7, 29_993])
    wide = gae(rewards, values, mask, cu, discount=0.99, lam=0.95)
    narrow = gae(rewards.astype(np.float32), values.astype(np.float32), mask, cu, discount=0.99, lam=0.95)
    for exact, found in zip(wide, narrow, strict=True):
        assert found.dtype == np.float32
        assert np.abs(found - exact).max() <= 1e-5 * max(1, np.abs(exact).max())


def test_masked_tokens_and_neighbours_change_no_bit():
    """In whatever tile and beside whatever sequence: the same bits."""
    numbers = np.random.default_rng(1)
    rewards, values = numbers.normal(size=(2, 700)).astype(np.float32)
    alone = gae(rewards, values, np.ones(700, bool), [0, 700], discount=0.99, lam=0.9)
    mask = np.zeros(3001, bool)
    mask[numbers.choice(np.arange(1000, 3000), 700, replace=False)] = True
    wide = [np.full(3001, np.nan, np.float32) for _ in range(2)]
    for onto, values_of in zip(wide, (rewards, values), strict=True):
        onto[mask] = values_of
    among = gae(*wide, mask, [0, 13, 1000, 3000, 3001], discount=0.99, lam=0.9)
    for one, other in zip(alone, among, strict=True):
        assert np.array_equal(one, other[mask])


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("from_left", [False, True])
def test_discounted_sums_are_the_recurrence(implementation, dtype, from_left):
    lengths = [0, 1, 7, 8, 9, 300, 0]
    cu = boundaries(lengths)
    values = torch.randn(int(cu[-1]), dtype=dtype, generator=torch.Generator().manual_seed(0))
    decay = torch.linspace(0, 1, len(lengths), dtype=torch.float64)
    got = implementation.discounted_sums(values, decay, cu, from_left)
    expected = np.zeros(len(values))
    for row, (begin, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        running, places = 0.0, range(begin, end)
        for i in places if from_left else reversed(places):
            running = float(values[i]) + float(decay[row]) * running
            expected[i] = running
    assert got.dtype == dtype
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=1e-12)


def test_long_sums_without_decay_are_exact():
    n = 1 << 17
    total = discounted_sums(torch.ones(n, dtype=torch.float64), 1.0, [0, n])
    assert torch.equal(total, torch.arange(n, 0, -1, dtype=torch.float64))


@IMPLEMENTATIONS
def test_segments(implementation):
    lengths = [3, 0, 33, 1, 16]
    cu = boundaries(lengths)
    values = torch.randn(53, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(53) % 3 == 0
    poisoned = torch.where(mask, values, torch.nan)
    parts = [slice(int(a), int(b)) for a, b in pairwise(cu)]
    sums = [float(values[part].double().sum()) for part in parts]
    assert implementation.segment_sum(values, None, cu).tolist() == pytest.approx(sums, abs=1e-6)
    kept = [float(values[part][mask[part]].double().sum()) for part in parts]
    assert implementation.segment_sum(poisoned, mask, cu).tolist() == pytest.approx(kept, abs=1e-6)
    means = [total / max(int(mask[part].sum()), 1) for total, part in zip(kept, parts, strict=True)]
    assert implementation.segment_mean(poisoned, mask, cu).tolist() == pytest.approx(means, abs=1e-6)
    means = [total / max(length, 1) for total, length in zip(sums, lengths, strict=True)]
    assert implementation.segment_mean(values, None, cu).tolist() == pytest.approx(means, abs=1e-6)


def test_sums_are_carried_in_double_precision():
    values = np.full(1 << 20, 0.1, np.float32)
    assert segment_sum(values, [0, len(values)])[0] == np.float32(len(values) * float(np.float32(0.1)))


@pytest.mark.kernels
def test_gradients():
    cu = boundaries([4, 0, 9, 1])
    values = torch.randn(14, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([1, 0] * 7, dtype=torch.uint8)
    decay = torch.tensor([0.9, 0.5, 1.0, 0.0])
    for function in (
        lambda x: discounted_sums(x, decay, cu),
        lambda x: segment_sum(x, cu),
        lambda x: segment_sum(x, cu, mask),
        lambda x: segment_mean(x, cu),
        lambda x: segment_mean(x, cu, mask),
    ):
        assert torch.autograd.gradcheck(function, values)
    assert torch.autograd.gradgradcheck(lambda x: discounted_sums(x, decay, cu).square(), values)
    assert not gae(values, values, mask, cu)[0].requires_grad


@pytest.mark.kernels
def test_torch_compile_traces_all_of_it():
    cu, mask = boundaries([5, 0, 8]), torch.arange(13) % 2 == 0

    def loss(values: torch.Tensor) -> torch.Tensor:
        advantages, returns = gae(values, values, mask, cu, discount=0.9, lam=0.5, bootstrap=torch.ones(3))
        scanned = discounted_sums(values, 0.9, cu) * (advantages + returns)
        return scanned.sum() + segment_sum(values, cu, mask).square().sum() + segment_mean(values, cu).exp().sum()

    plain, traced = (torch.linspace(-1, 1, 13, requires_grad=True) for _ in range(2))
    loss(plain).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(traced).backward()
    assert torch.equal(plain.grad, traced.grad)


def test_arrays_come_back_as_arrays_and_strides_do_not_matter():
    rewards = np.arange(20.0)[::2]
    rewards.flags.writeable = False
    found = gae(rewards, None, np.ones(10, bool), np.array([0, 10], np.int32), lam=np.float64(0.5))
    assert all(isinstance(part, np.ndarray) for part in found)
    whole = gae(torch.arange(0.0, 20, 2, dtype=torch.float64), None, torch.ones(10), [0, 10], lam=0.5)
    strided = torch.arange(0.0, 20, dtype=torch.float64)[::2]
    assert torch.equal(gae(strided, None, torch.ones(20)[::2], [0, 10], lam=0.5)[0], whole[0])
    assert np.array_equal(found[0], whole[0].numpy())
    backwards = np.arange(10.0)[::-1]
    assert segment_sum(backwards, [0, 3, 10]).tolist() == [24, 21]


def test_nothing_at_all():
    none = torch.zeros(0)
    assert [part.tolist() for part in gae(none, none, none, [0])] == [[], []]
    assert segment_sum(none, [0, 0, 0]).tolist() == [0, 0]
    assert segment_mean(none, [0]).tolist() == []
    assert discounted_sums(none, 0.5, [0]).tolist() == []


@IMPLEMENTATIONS
def test_wrong_boundaries_are_named(implementation):
    values = torch.zeros(4)
    for cu, said in (([1, 4], "the first entry is 0"), ([0, 3, 2, 4], "sequence 1 ends at 2"), ([0, 3], "4 tokens")):
        for function in (implementation.segment_sum, implementation.segment_mean):
            with pytest.raises(ValueError, match=said):
                function(values, None, torch.tensor(cu))
        with pytest.raises(ValueError, match=said):
            implementation.discounted_sums(values, torch.ones(len(cu) - 1), torch.tensor(cu), False)
        lambdas = torch.ones(len(cu) - 1, dtype=torch.float64)
        with pytest.raises(ValueError, match=said):
            implementation.gae(values, None, values != 1, torch.tensor(cu), 1.0, lambdas, None, None)


def test_wrong_arguments_are_named():
    ones, cu = torch.ones(4), [0, 1, 4]
    for arguments, said in (
        ({"rewards": torch.ones(4, 1)}, "rewards: shape"),
        ({"rewards": torch.ones(4, dtype=torch.int64)}, "rewards: torch.int64"),
        ({"values": torch.ones(3)}, "values: shape"),
        ({"values": ones.double()}, "values: torch.float64"),
        ({"mask": torch.ones(5)}, "mask: shape"),
        ({"turns": ones}, "turns: torch.float32"),
        ({"turns": torch.ones(3, dtype=torch.int64)}, "turns: shape"),
        ({"lam": [0.5]}, "lam: shape"),
        ({"bootstrap": torch.ones(3)}, "bootstrap: shape"),
        ({"cu_seqlens": []}, "cu_seqlens: no entries"),
    ):
        given = {"rewards": ones, "values": None, "mask": ones, "cu_seqlens": cu} | arguments
        with pytest.raises(ValueError, match=said):
            gae(**given)
    with pytest.raises(ValueError, match="decay: shape"):
        discounted_sums(ones, [0.5], cu)
    with pytest.raises(ValueError, match="mask: shape"):
        segment_sum(ones, cu, torch.ones(3))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_keep_their_promises(dtype):
    """Schemas, gradients registered, shapes and dtypes of results that are not computed, sizes that are not known."""
    ops, cu, numbers = torch.ops.pekoe, torch.tensor([0, 3, 3, 7]), torch.Generator().manual_seed(0)
    values = torch.randn(7, dtype=dtype, generator=numbers)
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    decay = torch.full((3,), 0.5, dtype=torch.float64)
    turns = torch.tensor([0, 0, 1, 0, 0, 1, 1])
    torch.library.opcheck(ops.gae, (values, values, mask, cu, 0.9, decay, None, None))
    torch.library.opcheck(ops.gae, (values, None, mask, cu, 0.9, decay, turns, decay))
    values = values.requires_grad_()
    for from_left in (False, True):
        torch.library.opcheck(ops.discounted_sums, (values, decay, cu, from_left))
    for operator in (ops.segment_sum, ops.segment_mean):
        torch.library.opcheck(operator, (values, mask, cu))
        torch.library.opcheck(operator, (values, None, cu))
