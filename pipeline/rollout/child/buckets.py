"""Memory that a rank and its engine's process both have: tensors cross with one copy.

On the host it is anonymous memory (memfd) handed over by descriptor: it has no name, needs no room in /dev/shm, and is
gone with the two processes, however they end. On an accelerator it is a tensor that torch's reductions hand over (CUDA
IPC, and what torch_npu registers); that path has run on no hardware yet.
"""

from __future__ import annotations

import mmap
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import torch

from pekoe.pipeline.rollout.child.protocol import Entry

NUM_BUCKETS = 2
ALIGNMENT = 64
"""Bytes; every dtype can be viewed from there."""


def place(fill: int) -> int:
    """Where the next tensor begins in a bucket that is filled up to `fill`."""
    return -(-fill // ALIGNMENT) * ALIGNMENT


def entry_view(memory: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor that lies in a bucket; a view."""
    dtype = getattr(torch, entry.dtype)
    size = dtype.itemsize * torch.Size(entry.shape).numel()
    return memory[entry.offset : entry.offset + size].view(dtype).view(entry.shape)


class SharedMemory:
    """One end of a piece of anonymous host memory. Both ends agree on its size by telling each other."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        self._memory: torch.Tensor | None = None

    @classmethod
    def create(cls) -> SharedMemory:
        return cls(os.memfd_create("pekoe-weights", os.MFD_CLOEXEC))

    @property
    def size(self) -> int:
        """Bytes that are mapped here."""
        return 0 if self._memory is None else self._memory.numel()

    def grow(self, size: int) -> None:
        """The sender's: at least `size` bytes. The other end must not be reading."""
        if size > self.size:
            os.ftruncate(self.descriptor, size)
            self.map(size)

    def map(self, size: int) -> torch.Tensor:
        """The first `size` bytes [B] as they are shared."""
        if size != self.size or self._memory is None:
            self._mapping = mmap.mmap(self.descriptor, size)
            self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        return self._memory

    def give_back(self, keep: int) -> None:
        """The pages beyond `keep` bytes return to the system; they read as zeros."""
        start = -(-keep // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._mapping is not None and self.size > start:
            self._mapping.madvise(mmap.MADV_REMOVE, start, self.size - start)

    def close(self) -> None:
        """The mapping goes with the last view of it."""
        self._mapping = self._memory = None
        os.close(self.descriptor)


class HostBucket:
    """The sender's bucket in host memory."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self.shared = SharedMemory.create()

    def room_for(self, size: int) -> torch.Tensor:
        """Memory [B] of `size` bytes or more."""
        self.shared.grow(max(size, self._bucket_bytes))
        return self.shared.map(self.shared.size)

    def handle(self) -> bytes:
        """The other end has its descriptor from the start."""
        return b""

    def rest(self) -> None:
        """Between two loads: only the ordinary size is kept."""
        self.shared.give_back(self._bucket_bytes)

    def close(self) -> None:
        self.shared.close()


class DeviceBucket:
    """The sender's bucket on its accelerator; freed between loads, since the device's memory is shared by turns."""

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._memory: torch.Tensor | None = None
        self._is_new = False

    def room_for(self, size: int) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < size:
            self._memory = torch.empty(max(size, self._bucket_bytes), dtype=torch.uint8, device=self._device)
            self._is_new = True
        return self._memory

    def handle(self) -> bytes:
        """What the other end needs to find a new bucket; empty when it has it. Everything queued is done then."""
        torch.get_device_module(self._device).synchronize(self._device)
        if not self._is_new:
            return b""
        self._is_new = False
        return bytes(ForkingPickler.dumps(self._memory))

    def rest(self) -> None:
        self._memory = None
        torch.get_device_module(self._device).empty_cache()

    def close(self) -> None:
        self._memory = None


Bucket = HostBucket | DeviceBucket


class ReceivedBucket:
    """The host process' view of a bucket, wherever it lies."""

    def __init__(self, descriptor: int | None) -> None:
        self._shared = None if descriptor is None else SharedMemory(descriptor)
        self._memory: torch.Tensor | None = None

    def memory(self, size: int, handle: bytes) -> torch.Tensor:
        """Its bytes [B], as the sender has filled them."""
        if self._shared is not None:
            return self._shared.map(size)
        if handle:
            import torch.multiprocessing  # noqa: F401  registers how tensors are handed over

            self._memory = pickle.loads(handle)
        assert self._memory is not None, "a device bucket comes with its handle first"
        return self._memory

    def used_up(self) -> None:
        """Before the sender may write again: everything that reads the bucket is done."""
        if self._memory is not None:
            torch.get_device_module(self._memory.device).synchronize(self._memory.device)

    def rest(self) -> None:
        """Between two loads; the sender frees a device bucket only after this."""
        self._memory = None
