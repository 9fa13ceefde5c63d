"""Blocks are small here, so that a short sequence has several and is done soon; and what torch.empty gives is NaN, so
that memory that a kernel should have written and did not is seen."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "these checks run in Triton's interpreter: TRITON_INTERPRET=1"
    from pekoe.kernels.logprob import triton_logprob
    from pekoe.kernels.packing import triton_ragged
    from pekoe.kernels.sequence import triton_sequence

    monkeypatch.setattr(triton_sequence, "BLOCK", 16)
    monkeypatch.setattr(triton_sequence, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(triton_ragged, "BLOCK", 16)
    monkeypatch.setattr(triton_ragged, "MAX_PROGRAMS", 5)
    monkeypatch.setattr(triton_logprob, "BLOCK", 512)
    monkeypatch.setattr(triton_logprob, "TILE_ROWS", 16)
    monkeypatch.setattr(triton_logprob, "TILE_ELEMENTS", 16 * 700)
    monkeypatch.setattr(triton_logprob, "MAX_PROGRAMS", 8)


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(9).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
