"""Rows and lengths of the key-value cache: growth keeps content, and what grows fits the need of the moment."""

from __future__ import annotations

import pytest
import torch

from pekoe.pipeline.rollout.engines.slot_cache import SlotCache, round_length


def filled(rows, length, max_rows=16):
    cache = SlotCache(torch.device("cpu"), max_rows)
    cache.reserve(rows, length)
    layer = cache.layer(0, torch.zeros(1, 3, 1, 5))
    layer.copy_(torch.arange(layer.numel(), dtype=torch.float32).view_as(layer))
    return cache, layer.clone()


def layer_of(cache):
    return cache.layer(0, torch.zeros(1, 3, 1, 5))


def test_growth_keeps_what_is_there():
    cache, before = filled(3, 10)
    assert before.shape == (2, 4, 3, 64, 5)
    assert cache.reserve(4, 64) is False
    assert cache.reserve(5, 65) is True
    after = layer_of(cache)
    assert after.shape == (2, 8, 3, 128, 5)
    assert torch.equal(after[:, :4, :, :64], before)
    assert after[:, 4:].abs().max() == 0


def test_what_grows_fits_the_need_of_the_moment():
    cache, before = filled(2, 1000)
    assert layer_of(cache).shape[3] == 1024
    cache.reserve(9, 70)
    assert layer_of(cache).shape == (2, 16, 3, 128, 5)
    assert torch.equal(layer_of(cache)[:, :2, :, :70], before[:, :2, :, :70])
    cache.reserve(2, 2000)
    assert layer_of(cache).shape[1] == 2


def test_rows_never_exceed_the_most():
    cache, _ = filled(3, 10, max_rows=5)
    cache.reserve(5, 10)
    assert cache.rows == 5


def test_copy_to_several_rows_leaves_the_rest():
    cache, before = filled(4, 64)
    cache.copy(1, [0, 3], 10)
    after = layer_of(cache)
    for row in (0, 3):
        assert torch.equal(after[:, row, :, :10], before[:, 1, :, :10])
        assert torch.equal(after[:, row, :, 10:], before[:, row, :, 10:])
    assert torch.equal(after[:, 1:3], before[:, 1:3])


def test_release_frees_and_starts_anew():
    cache, _ = filled(4, 64)
    assert cache.num_bytes == 2 * 4 * 3 * 64 * 5 * 4
    cache.release()
    assert cache.num_bytes == 0
    cache.reserve(1, 1)
    assert layer_of(cache).shape == (2, 1, 3, 64, 5)


@pytest.mark.parametrize(
    ("length", "rounded"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (1500, 1536), (8000, 8640)]
)
def test_rounded_lengths(length, rounded):
    assert round_length(length) == rounded
    assert round_length(rounded) >= rounded
