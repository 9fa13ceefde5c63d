"""Data-parallel ranks as threads that meet in each reduction, and packed batches to give them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import numpy as np
import torch

from pekoe.pipeline.records import Finish, PackedBatch, Trajectory, pack


class Meeting:
    """One rank's `Reduction`."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self._rank, self._barrier, self._slots = rank, barrier, slots
        self.num_calls = 0

    def _meet(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        self.num_calls += 1
        self._slots[self._rank] = value
        self._barrier.wait()
        result = combine(self._slots)
        self._barrier.wait()
        return result

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.dtype == torch.float64
        return self._meet(tensor, lambda slots: reduce(torch.add, slots))

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.dtype == torch.float64
        return self._meet(tensor, lambda slots: reduce(torch.maximum, slots))

    def gather(self, array: np.ndarray) -> np.ndarray:
        assert array.dtype == np.float64
        return self._meet(array, lambda slots: np.concatenate(slots))


def on_ranks(num_ranks: int, job: Callable[[int, Meeting], Any]) -> list[Any]:
    """`job(rank, its reduction)` on all ranks; they must have met the same number of times."""
    barrier, slots = threading.Barrier(num_ranks, timeout=90), [None] * num_ranks
    meetings = [Meeting(rank, barrier, slots) for rank in range(num_ranks)]

    def one(rank: int) -> Any:
        try:
            return job(rank, meetings[rank])
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        found = list(pool.map(one, range(num_ranks)))
    assert len({meeting.num_calls for meeting in meetings}) == 1
    return found


def trajectory(mask, reward=0.0, turns=None, sample=0, finish=Finish.STOP, logprobs=None) -> Trajectory:
    """A sequence with this loss mask [T]; turns count runs of sampled tokens unless they are given."""
    mask = np.array(mask, dtype=np.uint8)
    if turns is None:
        starts = np.diff(mask.astype(int), prepend=0) == 1
        turns = np.where(mask == 1, np.cumsum(starts) - 1, -1)
    return Trajectory(
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, -1.0 if logprobs is None else logprobs, 0).astype(np.float32),
        versions=np.where(mask == 1, 0, -1).astype(np.int32),
        turns=np.array(turns, dtype=np.int32),
        prompt_length=1,
        reward=reward,
        finish=finish,
        sample=sample,
    )


def packed(*rows: tuple[int, Trajectory], **extra: Any) -> PackedBatch:
    """(group, trajectory) rows with extras."""
    batch = pack(rows)
    batch.extra |= {name: np.array(values) for name, values in extra.items()}
    return batch
