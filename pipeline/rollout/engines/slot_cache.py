"""Keys and values of many sequences, a row each, in one growing tensor per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LENGTH_STEP = 64
"""Lengths are multiples of this: few reallocations, and masks aligned for every attention kernel."""


def round_length(length: int) -> int:
    """Next length that is allocated or attended over: multiples of 64, then of about an eighth of the length."""
    step = max(LENGTH_STEP, length // 8 // LENGTH_STEP * LENGTH_STEP)
    return -(-length // step) * step


class SlotCache:
    """One tensor [2, rows, heads, length, head_dim] per layer (keys, then values), made when a layer first asks for it.

    Rows and length grow on demand and fit what is needed at that moment, so a few long sequences at the end of a long
    tail do not pay for the many short ones before them. Nothing here knows which row belongs to whom.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self.device = device
        self.max_rows = max_rows
        self.rows = 0
        self.length = 0
        self._layers: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in list(self._layers.values()))

    def layer(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Storage of a layer; `like` [B, heads, T, head_dim] gives shape and dtype at the first touch."""
        found = self._layers.get(index)
        if found is None:
            found = self._allocate(like.shape[1], like.shape[3], like.dtype)
            self._layers[index] = found
        return found

    def reserve(self, rows: int, length: int) -> bool:
        """Makes room for `rows` sequences of `length` tokens; what the first ones hold stays. True if it moved."""
        if rows <= self.rows and length <= self.length:
            return False
        kept_rows, kept_length = min(rows, self.rows), min(length, self.length)
        self.rows = rows if rows <= self.rows else max(rows, min(1 << (rows - 1).bit_length(), self.max_rows))
        self.length = round_length(length)
        for index, old in self._layers.items():
            new = self._allocate(old.shape[2], old.shape[4], old.dtype)
            new[:, :kept_rows, :, :kept_length] = old[:, :kept_rows, :, :kept_length]
            self._layers[index] = new
        return True

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copies the first `length` positions of a row to other rows."""
        index = torch.tensor(targets, device=self.device)
        for layer in list(self._layers.values()):
            layer[:, index, :, :length] = layer[:, source : source + 1, :, :length]

    def release(self) -> None:
        """Frees everything; the next `reserve` starts anew."""
        self._layers.clear()
        self.rows = 0
        self.length = 0

    def _allocate(self, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(2, self.rows, heads, self.length, head_dim, dtype=dtype, device=self.device)
