"""What C is given lies where the caller has it: arrays and tensors of the right dtype go in without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pekoe.kernels.logprob import native as logprob
from pekoe.kernels.logprob.logprob import logits_logprobs
from pekoe.kernels.native.native_library import pointer
from pekoe.kernels.packing import native as plans
from pekoe.kernels.packing import native_ragged, native_trie
from pekoe.kernels.packing.packing import best_fit, karmarkar_karp
from pekoe.kernels.packing.prefix_trie import prefix_trie
from pekoe.kernels.packing.ragged import unpack
from pekoe.kernels.sequence import native as sequence
from pekoe.kernels.sequence.sequence import gae, segment_sum


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> set[int | None]:
    """The addresses that C was given."""
    seen: set[int | None] = set()

    def watched(array: Any) -> Any:
        found = pointer(array)
        seen.add(getattr(found, "value", found))
        return found

    for module in (plans, native_ragged, native_trie, sequence, logprob):
        monkeypatch.setattr(module, "pointer", watched)
    return seen


def address(array: Any) -> int:
    return int(array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data)


CU = np.array([0, 3, 7])


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_arrays_and_tensors_go_in_as_they_lie(kind: Any, given: set[int | None]) -> None:
    cu, tokens = kind(CU), kind(np.arange(7, dtype=np.int32))
    values, mask = kind(np.ones(7, np.float32)), kind(np.ones(7, np.uint8))
    rewards, packed, lengths = kind(np.ones(7, np.float32)), kind(np.ones((7, 2))), kind(np.array([3, 4]))
    gae(rewards, values, mask, cu)
    segment_sum(packed[:, 0] if kind is np.asarray else values, cu)
    unpack(packed, cu)
    prefix_trie(tokens, cu)
    best_fit(lengths, 8)
    for array in (rewards, values, mask, cu, packed, tokens, lengths):
        assert address(array) in given


def test_a_cast_would_be_seen(given: set[int | None]) -> None:
    lengths = np.array([3, 4], dtype=np.int32)
    best_fit(lengths, 8)
    assert address(lengths) not in given


def test_logits_and_costs_go_in_as_they_lie(given: set[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    costs, logits = np.array([3.0, 4.0]), torch.randn(5, 9)
    tiles: list[int] = []
    take = logprob.NativeEpilogue.take

    def watched(self: Any, tile: torch.Tensor, *rest: Any) -> None:
        tiles.append(tile.data_ptr())
        take(self, tile, *rest)

    monkeypatch.setattr(logprob.NativeEpilogue, "take", watched)
    karmarkar_karp(costs, 2)
    logits_logprobs(logits, torch.arange(5))
    assert address(costs) in given
    assert address(logits) in tiles
