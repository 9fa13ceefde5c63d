"""The staged copy of a checkpoint: sharded tensors copied into host memory that is used again by the next save.

Memory: as much as this rank's shards of what is saved, from the first save on. With float32 master weights and AdamW
that is 12 bytes for each parameter, divided by the number of trainer ranks; page-locked where the source is on an
accelerator, so that the copy runs at the speed of the bus.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostCopy:
    """Buffers by name; `take` fills them, and what it gives is valid until the next `take`."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, ...], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same nested dictionary with every tensor as a true copy in host memory (also where the source lies there
        already); sharded ones stay sharded as they were. Returns when all copies are done."""
        copied: dict[str, Any] = self._copy((), state)
        return copied

    def _copy(self, path: tuple[str, ...], value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._copy((*path, str(key)), item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._copy((*path, str(index)), item) for index, item in enumerate(value)]
        if isinstance(value, DTensor):
            # As FSDP's own offloading does: the layout of the mesh, the local part in host memory.
            local = self._fill(path, value.to_local())
            return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return self._fill(path, value) if isinstance(value, Tensor) else copy.deepcopy(value)

    def _fill(self, path: tuple[str, ...], source: Tensor) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            pinned = source.device.type != "cpu" and source.numel() > 0
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
            self._buffers[path] = buffer
        buffer.copy_(source)
        return buffer
