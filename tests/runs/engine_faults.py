"""A user's dataset module that makes engines of a run fail or stand still: rollout ranks import it first of all.

`ENGINE_FAULT` in the environment says what: faults between `;`, each `kind:rank:…`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from pekoe.pipeline.data.jsonl_dataset import JsonlDataset
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine

STARTED = time.monotonic()


class Rows(JsonlDataset):
    """JSON lines, unchanged."""


def decode(step: int, engines: int) -> None:
    """The first so many engines raise once they have decoded so many steps."""
    turn = HfEngine._turn
    failed: set[int] = set()

    def failing(self: HfEngine) -> None:
        if self._decoder.num_steps >= step and (id(self) in failed or len(failed) < engines):
            failed.add(id(self))
            raise RuntimeError("planted in a decode")
        turn(self)

    HfEngine._turn = failing  # type: ignore[method-assign]


def load(version: int, times: int) -> None:
    """The load of a version raises after three tensors, so many times."""
    original = HfEngine.load_weights
    left = [times]

    def failing(self: HfEngine, weights: Iterable[tuple[str, Any]], asked: int) -> None:
        if asked >= version and left[0] > 0:
            left[0] -= 1
            tensors = iter(weights)
            for _ in range(3):
                next(tensors)
            raise RuntimeError("planted in a load")
        original(self, weights, asked)

    HfEngine.load_weights = failing  # type: ignore[method-assign]


def stall(version: int, seconds: int) -> None:
    """From a version on, one token takes so long."""
    turn = HfEngine._turn
    is_over = [False]

    def slow(self: HfEngine) -> None:
        if self.version >= version and not is_over[0] and any(self._decoder.rows):
            is_over[0] = True
            time.sleep(seconds)
        turn(self)

    HfEngine._turn = slow  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[int, int], None]] = {"decode": decode, "load": load, "stall": stall}

for fault in filter(None, os.environ.get("ENGINE_FAULT", "").split(";")):
    kind, rank, first, second = fault.split(":")
    if os.environ.get("PMI_RANK") == rank:
        FAULTS[kind](int(first), int(second))
