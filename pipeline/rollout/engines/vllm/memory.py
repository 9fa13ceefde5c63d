"""The memory that a sleeping engine gives back."""

from __future__ import annotations

from typing import Any

import torch


class CacheMemory:
    """On a CPU the KV cache's storage; on other devices vLLM's own sleep mode, which moves the weights to the host."""

    def __init__(self, client: Any, runner: Any, device: str) -> None:
        self._client = client
        self._device = device
        storages = {s.data_ptr(): s for s in map(torch.Tensor.untyped_storage, tensors_of(runner.kv_caches))}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]

    @property
    def num_bytes(self) -> int:
        """Now held by the KV cache."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def release(self) -> None:
        if self._device == "cpu":
            for storage, _ in self._storages:
                storage.resize_(0)
        else:
            self._client.sleep(level=1)

    def restore_weights(self) -> None:
        """The weights alone, so that others can be loaded before the cache needs its memory."""
        if self._device != "cpu":
            self._client.wake_up(["weights"])

    def restore(self) -> None:
        """All that is still away; the cache is empty afterwards."""
        if self._device != "cpu":
            self._client.wake_up()
            return
        for storage, size in self._storages:
            storage.resize_(size)
            torch.tensor([], dtype=torch.uint8).set_(storage).zero_()

    def close(self) -> None:
        """Lets go of everything."""
        self._client, self._storages = None, []


def tensors_of(caches: Any) -> list[torch.Tensor]:
    """All tensors in vLLM's list of caches, whose entries may be lists."""
    if isinstance(caches, torch.Tensor):
        return [caches]
    return [tensor for cache in caches for tensor in tensors_of(cache)]
