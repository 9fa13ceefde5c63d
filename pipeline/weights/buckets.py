"""Which tensors travel together: a plan that sender and receivers compute alike from the same specs.

A bucket is one contiguous stretch of bytes; each tensor in it starts at a multiple of `ALIGNMENT`, so that it can be
viewed in place under its own dtype. The end of a transfer is told by counts and total bytes, never implied by content.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from pekoe.pipeline.messages import TensorSpec

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in its bucket."""

    spec: TensorSpec
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring tensors of the sending order."""

    slots: tuple[Slot, ...]
    num_bytes: int
    """Extent, padding between tensors included; 0 when every tensor in it is empty."""

    @property
    def names(self) -> str:
        """The tensors in it, for messages to people."""
        first, last = self.slots[0].spec.name, self.slots[-1].spec.name
        return first if len(self.slots) == 1 else f"{first} … {last}"


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of a model."""

    buckets: tuple[Bucket, ...]
    num_tensors: int
    total_bytes: int
    """Bytes of all tensors, without padding."""
    digest: int
    """63-bit hash of names, shapes, dtypes and the cut: equal plans have equal digests."""

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.num_bytes for bucket in self.buckets), default=0)


def torch_dtype(name: str) -> torch.dtype:
    """`bfloat16` -> torch.bfloat16."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor dtype: {name!r} is not known; allowed are torch's names (float32, bfloat16, …)")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> BucketPlan:
    """Fills buckets of at most `bucket_bytes` in the given order; a larger tensor gets its own. No tensors: no
    buckets."""
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tensor {twice!r} is named twice; a tensor has one name (tied ones are sent under each)")
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = total = 0
    for spec in specs:
        num_bytes = prod(spec.shape) * torch_dtype(spec.dtype).itemsize
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if slots and offset + num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), end))
            slots, offset = [], 0
        slots.append(Slot(spec, offset, num_bytes))
        end = offset + num_bytes
        total += num_bytes
    if slots:
        buckets.append(Bucket(tuple(slots), end))
    text = "\n".join(f"{spec.name} {tuple(spec.shape)} {spec.dtype}" for spec in specs) + f"\n{bucket_bytes}"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    return BucketPlan(tuple(buckets), len(specs), total, digest)


def fill(bucket: Bucket, buffer: torch.Tensor, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Takes the bucket's tensors from `weights` into `buffer` (uint8, any device).

    Raises ValueError when the next tensor is not the expected one.
    """
    for slot in bucket.slots:
        found = next(weights, None)
        if found is None:
            raise ValueError(f"weights ended before tensor {slot.spec.name!r}")
        name, tensor = found
        check_tensor(slot.spec, name, tensor)
        _view(slot, buffer).copy_(tensor.detach())


def check_tensor(spec: TensorSpec, name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError, naming the tensor, unless name, shape and dtype are as announced."""
    if name != spec.name:
        raise ValueError(f"tensor {name!r} came where {spec.name!r} was announced")
    if tuple(tensor.shape) != tuple(spec.shape) or tensor.dtype != torch_dtype(spec.dtype):
        raise ValueError(
            f"tensor {name!r}: {dtype_name(tensor.dtype)}{list(tensor.shape)}, "
            f"announced as {spec.dtype}{list(spec.shape)}"
        )


def views(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each slot, as views into `buffer`."""
    for slot in bucket.slots:
        yield slot.spec.name, _view(slot, buffer)


def checksum(bucket: Bucket, buffer: torch.Tensor) -> int:
    """CRC-32 over the bucket's tensors, in order, without padding."""
    host = buffer[: bucket.num_bytes].cpu().numpy()
    value = 0
    for slot in bucket.slots:
        value = zlib.crc32(host[slot.offset : slot.offset + slot.num_bytes].data, value)
    return value


def _view(slot: Slot, buffer: torch.Tensor) -> torch.Tensor:
    flat = buffer[slot.offset : slot.offset + slot.num_bytes]
    return flat.view(torch_dtype(slot.spec.dtype)).view(tuple(slot.spec.shape))
