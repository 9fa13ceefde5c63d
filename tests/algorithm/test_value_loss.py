"""The critic's loss: hand values, gradients, and invariance to how a batch is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pekoe.pipeline.algorithm.value_loss import ValueObjective, clipped_value_loss
from pekoe.pipeline.config.companions import CriticConfig


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def batch_of(old, returns, mask, lengths, truncated=None):
    return {
        "cu_seqlens": torch.tensor(np.cumsum([0, *lengths])),
        "loss_mask": torch.tensor(mask, dtype=torch.uint8),
        "truncated": torch.tensor(truncated or [0] * len(lengths), dtype=torch.uint8),
        "values": f64(old),
        "returns": f64(returns),
    }


@pytest.mark.parametrize(
    ("value", "old", "target", "eps", "loss", "clipped", "slope"),
    [
        (1.0, 0.0, 3.0, 0.5, 0.5 * 2.5**2, True, 0.0),
        (1.0, 0.0, -3.0, 0.5, 0.5 * 4.0**2, False, 4.0),
        (0.25, 0.0, 1.0, 0.5, 0.5 * 0.75**2, False, -0.75),
        (-1.0, 0.0, -3.0, 0.5, 0.5 * 2.5**2, True, 0.0),
        (1.0, 0.0, 3.0, None, 0.5 * 2.0**2, False, -2.0),
    ],
)
def test_one_token(value, old, target, eps, loss, clipped, slope):
    now = f64([value]).requires_grad_()
    losses, was_clipped = clipped_value_loss(now, f64([old]), f64([target]), eps)
    assert losses.item() == pytest.approx(loss)
    assert was_clipped.item() == clipped
    losses.sum().backward()
    assert now.grad.item() == pytest.approx(slope)


def test_masked_and_truncated_tokens_and_nan_are_left_out():
    batch = batch_of([math.nan, 0, 0, math.nan, 0], [math.nan, 1, 2, math.nan, 9], [0, 1, 1, 0, 1], [3, 2], [0, 1])
    now = f64([math.nan, 0.5, 0.5, math.nan, 0.5]).requires_grad_()
    loss, stats = ValueObjective(CriticConfig(), 2, mask_truncated=True)(now, None, batch)
    assert loss.item() == pytest.approx((0.5 * 0.25 + 0.5 * 2.25) / 2)
    loss.backward()
    assert now.grad.tolist() == pytest.approx([0, -0.25, -0.75, 0, 0])
    assert stats["tokens"] == 2
    assert stats["error_max"] == pytest.approx(1.5)
    assert stats["change"] == pytest.approx(1.0)


def test_gradient_equals_finite_differences():
    torch.manual_seed(1)
    batch = batch_of(torch.randn(8).tolist(), (2 * torch.randn(8)).tolist(), [0, 1, 1, 0, 0, 1, 1, 1], [4, 4])
    objective = ValueObjective(CriticConfig(eps_clip=0.3), 5)
    now = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: objective(x, None, batch)[0], (now,), eps=1e-7, atol=1e-5)


def test_any_cut_gives_the_same_loss_and_gradient():
    torch.manual_seed(2)
    lengths, mask = [3, 1, 4], [0, 1, 1, 0, 0, 1, 0, 1]
    old, returns = torch.randn(8).tolist(), torch.randn(8).tolist()
    objective = ValueObjective(CriticConfig(eps_clip=0.2), sum(mask))
    now = torch.randn(8, dtype=torch.float64, requires_grad=True)
    loss, stats = objective(now, None, batch_of(old, returns, mask, lengths))
    (gradient,) = torch.autograd.grad(loss, now)
    total, sums, place = 0.0, dict.fromkeys(stats, 0.0), 0
    for length in reversed(lengths):
        place = place or 8
        part = slice(place - length, place)
        place -= length
        piece = now.detach()[part].clone().requires_grad_()
        share, found = objective(piece, None, batch_of(old[part], returns[part], mask[part], [length]))
        (own,) = torch.autograd.grad(share, piece)
        torch.testing.assert_close(own, gradient[part], atol=1e-12, rtol=1e-12)
        total += share.item()
        sums = {n: max(sums[n], v.item()) if n.endswith("_max") else sums[n] + v.item() for n, v in found.items()}
    assert total == pytest.approx(loss.item(), abs=1e-12)
    assert sums == pytest.approx({name: value.item() for name, value in stats.items()}, abs=1e-12)


def test_nothing():
    loss, stats = ValueObjective(CriticConfig(), 7)(torch.zeros(0, requires_grad=True), None, batch_of([], [], [], []))
    assert loss.item() == 0
    assert not any(stats.values())
