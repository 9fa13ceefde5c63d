"""A second copy of the weights, filled while the engine decodes with the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class StagedWeights:
    """Buffers on the device on which tensors arrive; kept from version to version."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes all tensors; what an earlier version had and this one has not is let go. A name that comes twice stays
        twice in none: the engine would refuse it, so does this (ValueError)."""
        filled: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name in filled:
                raise ValueError(f"weights: {name!r} was given twice")
            buffer = self._buffers.get(name)
            fits = buffer is not None and (buffer.shape, buffer.dtype, buffer.device) == (
                tensor.shape, tensor.dtype, tensor.device,
            )  # fmt: skip
            if buffer is None or not fits:
                buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            buffer.copy_(tensor)
            filled[name] = buffer
        self._buffers = filled

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """In the order of arrival."""
        return iter(self._buffers.items())
