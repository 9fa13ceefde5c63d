"""Sums, maxima and rows over the trainer ranks: what statistics of a whole step are taken over."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor


class TrainerGroup:
    """Torch's default group, whose ranks are the data-parallel ones; every method is collective over it.

    `device` is where the tensors of that group live; what is passed in may lie anywhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rank = dist.get_rank()

    def sum(self, tensor: Tensor) -> Tensor:
        """Of the tensors of all ranks, which have one shape."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """As `sum`."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows [N, k] of all ranks in rank order, from `array` [n, k] of this one; n may differ. Items of 8 bytes."""
        if array.ndim != 2 or array.dtype.itemsize != 8:
            raise ValueError(f"array: {array.dtype} of shape {array.shape}; rows of 8-byte numbers are gathered")
        size = dist.get_world_size()
        if size == 1:
            return array.copy()
        counts = self._all_gather(torch.tensor([len(array)], dtype=torch.int64))
        most = max(int(count) for count in counts)
        padded = np.zeros((most, array.shape[1]), dtype=array.dtype)
        padded[: len(array)] = array
        parts = self._all_gather(torch.from_numpy(padded.view(np.int64)))
        rows = [part[: int(count)].numpy() for part, count in zip(parts, counts, strict=True)]
        return np.concatenate(rows).view(array.dtype)

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """The tensor passed in stays as it is."""
        moved = tensor.to(self._device, copy=True)
        dist.all_reduce(moved, operation)
        return moved.to(tensor.device)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        moved = tensor.to(self._device)
        found = [torch.empty_like(moved) for _ in range(dist.get_world_size())]
        dist.all_gather(found, moved)
        return [part.cpu() for part in found]
