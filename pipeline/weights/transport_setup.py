"""What every transport is built from, and the error that all of them raise."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    import torch


class TransferError(RuntimeError):
    """A transfer of weights failed; the text says where (version, bucket, tensors) and who."""


@dataclass(frozen=True)
class TransportSetup:
    """Facts of one rank that a transport needs; equal on all members but for `rank`, `role`, `device` and `host`."""

    rank: int
    """World rank."""
    role: str
    """`trainer` or `rollout`."""
    run: RunDirectory
    device: torch.device
    """Where full tensors come from (sender) or are wanted (receiver)."""
    backend: str
    """Process-group backend of the collective transport: `gloo`, `nccl` or `hccl`."""
    host: str
    """Address under which other ranks reach this one."""
    bucket_bytes: int
    """Bound of a bucket; a larger tensor gets a bucket of its own."""
    bucket_seconds: float
    """Time limit of one bucket, and of forming the group."""
    verify: bool = False
    """Compare a checksum of every bucket on both sides (costs a pass over the bytes)."""
    keep_versions: int = 2
    """Newest versions that the disk transport keeps."""
    folder: Path | None = None
    """Where the disk transport writes; None = the run's `weights/`."""
    reader: str = ""
    """Name under which a receiver of the disk transport says what it reads; empty = `rank-N`."""

    @property
    def weights_folder(self) -> Path:
        return self.folder or self.run.weights

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"weights.bucket_mib: {self.bucket_bytes} bytes; must be at least 1")
        if not self.bucket_seconds > 0:
            raise ValueError(f"weights.bucket_seconds: {self.bucket_seconds}; must be above 0")
        if self.keep_versions < 1:
            raise ValueError(f"keep_versions: {self.keep_versions}; must be at least 1")


def exhaust(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Takes the rest of the tensors, so that the gathers behind them stay in step over the trainer ranks."""
    deque(weights, maxlen=0)
