"""A packed batch's arrays as tensors on the engine's device: what loss functions read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pekoe.pipeline.records import PackedBatch

FIELDS = (
    "tokens", "cu_seqlens", "loss_mask", "logprobs", "versions", "turns", "rewards", "groups", "samples", "truncated",
    "position_ids",
)  # fmt: skip
WIDENED = ("tokens", "cu_seqlens", "position_ids")
"""Used as indices: int64."""


def batch_tensors(batch: PackedBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """The fields of `batch`, its `position_ids` and `extra`, by name."""
    arrays: dict[str, npt.NDArray[np.generic]] = {name: getattr(batch, name) for name in FIELDS}
    clash = sorted(set(arrays) & set(batch.extra))
    if clash:
        raise ValueError(f"batch.extra: {clash} are names of its fields")
    tensors = {name: _tensor(array).to(device) for name, array in (arrays | batch.extra).items()}
    for name in WIDENED:
        tensors[name] = tensors[name].to(torch.int64)
    return tensors


def _tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    """Shares memory where that is safe."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
