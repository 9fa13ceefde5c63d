"""The order in which examples are admitted, and the memory of which are done: each position ends exactly once.

A position is one example in one epoch; its group number is `records.group_number(epoch, position)`. Positions are
admitted in order and closed in any order. The state holds a low-water mark (all before it are closed), what is closed
above it, and what was in flight; so a restored cursor issues again exactly what was admitted but not closed, first and
in admission order, then goes on. Neither the number of ranks nor the batch size enters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pekoe.pipeline.records import Int64, epoch_and_position, group_number

HOW = ("consumed", "filtered", "skipped")


def epoch_order(num_examples: int, seed: int, epoch: int, shuffle: bool) -> Int64:
    """[num_examples] example of each position: a permutation fixed by (seed, epoch).

    Sorts raw Philox words instead of calling `permutation`, whose stream may change between numpy releases.
    """
    if not shuffle:
        return np.arange(num_examples, dtype=np.int64)
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_examples)
    return np.argsort(words, kind="stable").astype(np.int64)


class Cursor:
    """Exactly-once order over `epochs` passes (None: without end). Owned by the head's control loop; not thread-safe.

    A group closed as `skipped` puts its example on a skip list: later epochs pass over it without admitting it. What
    was admitted before its example came onto the list ends like any other group, also after a resume.
    """

    def __init__(self, num_examples: int, seed: int, shuffle: bool = True, epochs: int | None = 1) -> None:
        if num_examples < 1:
            raise ValueError(f"num_examples: {num_examples} must be at least 1")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs: {epochs} must be at least 1")
        self._size = num_examples
        self._seed = seed
        self._shuffle = shuffle
        self._end = math.inf if epochs is None else epochs * num_examples
        self._next = 0
        self._low = 0
        self._closed: set[int] = set()
        self._in_flight: set[int] = set()
        self._owed: set[int] = set()
        self._skipped: set[int] = set()
        self._order: tuple[int, Int64] = (-1, np.zeros(0, np.int64))

    def admit(self) -> tuple[int, int] | None:
        """The next (group number, example index), now in flight; None at the end of the last epoch."""
        self._pass_over()
        if self._next >= self._limit():
            return None
        ordinal = self._next
        self._in_flight.add(ordinal)
        self._owed.discard(ordinal)
        self._next += 1
        return self._group(ordinal), self.example(self._group(ordinal))

    def close(self, group: int, how: str) -> None:
        """Ends a group that is in flight: `consumed`, `filtered` or `skipped`. Raises ValueError for any other
        group."""
        if how not in HOW:
            raise ValueError(f"how: {how!r} is not allowed; allowed: {', '.join(HOW)}")
        ordinal = self._ordinal(group)
        if ordinal not in self._in_flight:
            raise ValueError(f"group {group} is not in flight: it cannot end as {how}")
        self._in_flight.remove(ordinal)
        if how == "skipped":
            self._skipped.add(self.example(group))
        self._mark_closed(ordinal)

    def is_closed(self, group: int) -> bool:
        """Whether the group has ended (or was passed over)."""
        return self._is_closed(self._ordinal(group))

    def example(self, group: int) -> int:
        """Example index of a group, whatever its state."""
        epoch, position = epoch_and_position(group)
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self._size, self._seed, epoch, self._shuffle))
        return int(self._order[1][position])

    def in_flight(self) -> list[int]:
        """Group numbers that are admitted and not closed, in admission order."""
        return [self._group(ordinal) for ordinal in sorted(self._in_flight)]

    def owed(self) -> list[int]:
        """Group numbers that were in flight in the restored state and were not issued again yet."""
        return [self._group(ordinal) for ordinal in sorted(self._owed)]

    def remaining(self) -> float:
        """Positions not yet admitted, those to be issued again included; `inf` without an end.

        0 exactly when `admit` would give None; otherwise positions of skipped examples still ahead are counted too.
        """
        self._pass_over()
        done_ahead = sum(ordinal >= self._next for ordinal in self._closed)
        return max(0, self._limit() - self._next - done_ahead)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON; its size grows with the groups in flight, not with the dataset."""
        return {
            "num_examples": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "low": self._low,
            "closed": _to_runs(ordinal - self._low for ordinal in self._closed),
            "in_flight": _to_runs(ordinal - self._low for ordinal in self._in_flight | self._owed),
            "skipped": sorted(self._skipped),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes back to a state. The number of epochs may differ; raises ValueError when dataset or order do."""
        for key, value in (("num_examples", self._size), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != value:
                raise ValueError(f"cursor: {key} is {value}, but the state was saved with {state[key]}")
        self._low = state["low"]
        self._closed = _from_runs(state["closed"], self._low)
        self._owed = _from_runs(state["in_flight"], self._low)
        self._skipped = set(state["skipped"])
        self._in_flight = set()
        self._next = self._low

    def _pass_over(self) -> None:
        """Moves to the next position that is to be admitted; closes those of skipped examples on the way."""
        while self._next < self._limit():
            if not self._is_closed(self._next):
                if self._next in self._owed or self.example(self._group(self._next)) not in self._skipped:
                    return
                self._mark_closed(self._next)
            self._next += 1

    def _limit(self) -> float:
        """Where admission ends: after the last epoch; when every example is on the skip list, after what is owed."""
        if len(self._skipped) < self._size:
            return self._end
        return min(self._end, max(self._owed, default=self._next - 1) + 1)

    def _mark_closed(self, ordinal: int) -> None:
        self._closed.add(ordinal)
        while self._low in self._closed:
            self._closed.remove(self._low)
            self._low += 1

    def _is_closed(self, ordinal: int) -> bool:
        return ordinal < self._low or ordinal in self._closed

    def _group(self, ordinal: int) -> int:
        return group_number(*divmod(ordinal, self._size))

    def _ordinal(self, group: int) -> int:
        epoch, position = epoch_and_position(group)
        if group < 0 or position >= self._size:
            raise ValueError(f"group {group} (epoch {epoch}, position {position}) is not one of {self._size} examples")
        return epoch * self._size + position


def _to_runs(numbers: Iterable[int]) -> list[list[int]]:
    """Sorted numbers as [start, length] of consecutive stretches."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def _from_runs(runs: Iterable[Sequence[int]], first: int) -> set[int]:
    """The other way round, counted from `first`."""
    return {first + start + i for start, length in runs for i in range(length)}
