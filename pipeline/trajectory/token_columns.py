"""Token columns of many rows: laid end to end piece by piece, and checked for all rows at once.

Legend: `active` [tokens] is loss_mask != 0; `offsets` [rows + 1] count from the first token of the rows that are looked
at, `starts` are the offsets without the last. Together the checks are those of `Trajectory.check`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pekoe.pipeline.messages import Row
from pekoe.pipeline.records import (
    HIGHEST_LOGPROB,
    Int64,
    Trajectory,
    common_prefix,
    extra_or_zeros,
    turn_rewards_are_sound,
)
from pekoe.pipeline.trajectory.schema import OPTIONAL_COLUMNS, TOKEN_COLUMNS, Column, Columns, column_dtype

PIECE_TOKENS = 1 << 17
"""Tokens of one piece: it stays in the processor's cache until it is checked, hashed and handed to the kernel."""

Bools = npt.NDArray[np.bool_]


def slices_of(offsets: Int64, limit: int) -> Iterator[tuple[int, int]]:
    """All rows in ranges (first, end) of at most `limit` tokens, or of one row that has more."""
    first, num_rows = 0, len(offsets) - 1
    while first < num_rows:
        end = max(first + 1, int(np.searchsorted(offsets, offsets[first] + limit, "right")) - 1)
        yield first, end
        first = end


def numbers_are_sound(numbers: Columns, lengths: Int64) -> bool:
    prompts = numbers["prompt_length"]
    return bool(((prompts > 0) & (prompts < lengths)).all()) and bool(np.isfinite(numbers["reward"]).all())


def mask_is_sound(active: Bools, starts: Int64) -> bool:
    """Something was sampled in each row, and not its first token."""
    return not active[starts].any() and bool(np.maximum.reduceat(active.view(np.uint8), starts).all())


def logprobs_are_sound(logprobs: Column) -> bool:
    """Finite and not positive; a NaN makes both comparisons false."""
    return bool(logprobs.max() <= HIGHEST_LOGPROB and logprobs.min() > -np.inf)


def versions_are_sound(versions: Column, active: Bools) -> bool:
    """-1 on tokens that were given, at least 0 on sampled ones."""
    return int(versions.min()) >= -1 and np.array_equal(versions >= 0, active)


def optional_is_sound(name: str, values: Column, active: Bools, turns: Column, starts: Int64) -> bool:
    """An entry of OPTIONAL_COLUMNS."""
    if not np.isfinite(values).all():
        return False
    if name == "teacher_logprob":
        return bool(values.max() <= HIGHEST_LOGPROB) and not values[~active].any()
    return turn_rewards_are_sound(values, active, turns, starts)


def rows_are_sound(tokens: Columns, offsets: Int64, numbers: Columns) -> bool:
    """What `Trajectory.check` looks at; `tokens` are the columns of these rows only."""
    if not numbers_are_sound(numbers, np.diff(offsets)):
        return False
    for first, end in slices_of(offsets, PIECE_TOKENS):
        starts, part = offsets[first:end] - offsets[first], slice(offsets[first], offsets[end])
        active = tokens["loss_mask"][part] != 0
        if not (
            mask_is_sound(active, starts)
            and logprobs_are_sound(tokens["logprob"][part])
            and versions_are_sound(tokens["version"][part], active)
        ):
            return False
        for name in OPTIONAL_COLUMNS:
            if name in tokens and not optional_is_sound(name, tokens[name][part], active, tokens["turn"][part], starts):
                return False
    return True


def raise_first(trajectories: Sequence[Trajectory]) -> NoReturn:
    """Says what is wrong with the first trajectory that is not sound."""
    for trajectory in trajectories:
        trajectory.check()
    raise ValueError("a trajectory is not sound once its values have the types of the file")


class RowFacts:
    """What the head is told of rows, gathered column by column."""

    def __init__(self) -> None:
        self._num_active: list[int] = []
        self._min_versions: list[int] = []
        self._max_versions: list[int] = []
        self._turn_rewards: list[float] = []
        self._num_shared: list[int] = []
        self._last_row: Column = np.zeros(0, np.int32)

    def add_tokens(self, tokens: Column, offsets: Int64, numbers: Columns) -> None:
        """Of the next rows; `numbers` are those of all rows."""
        row = len(self._num_shared)
        for start, end in itertools.pairwise(offsets.tolist()):
            here = tokens[start:end]
            follows = row > 0 and all(numbers[name][row - 1] == numbers[name][row] for name in ("group", "try"))
            self._num_shared.append(common_prefix(self._last_row, here) if follows else 0)
            self._last_row, row = here, row + 1
        self._last_row = self._last_row.copy()

    def add_mask(self, active: Bools, starts: Int64) -> None:
        self._num_active += np.add.reduceat(active.view(np.uint8), starts, dtype=np.int32).tolist()

    def add_versions(self, versions: Column, starts: Int64) -> None:
        """-1, the version of a token that was given, is the highest number without a sign."""
        self._min_versions += np.minimum.reduceat(versions.view(np.uint32), starts).tolist()
        self._max_versions += np.maximum.reduceat(versions, starts).tolist()

    def add_turn_rewards(self, rewards: Column, starts: Int64) -> None:
        self._turn_rewards += np.add.reduceat(rewards.astype(np.float64), starts).tolist()

    def rows(self, numbers: Columns, lengths: Int64) -> list[Row]:
        """Of rows 0, 1, …; rewards as they are stored, those of turns added to the outcome's."""
        rewards = numbers["reward"].astype(np.float64)
        if self._turn_rewards:
            rewards = rewards + np.array(self._turn_rewards)
        columns = (
            range(len(lengths)),
            numbers["sample"].tolist(),
            lengths.tolist(),
            self._num_active,
            rewards.tolist(),
            self._min_versions,
            self._max_versions,
            (numbers["truncated"] != 0).tolist(),
            self._num_shared,
        )
        return [Row(*values) for values in zip(*columns, strict=True)]


def _taker(name: str) -> Callable[[Trajectory], npt.NDArray[Any]]:
    """Gives a trajectory's part of a column."""
    if name in OPTIONAL_COLUMNS:
        return partial(extra_or_zeros, OPTIONAL_COLUMNS[name][0])
    return attrgetter(TOKEN_COLUMNS[name][0])


class TokenColumns:
    """The columns of /tokens of some trajectories, checked as they are asked for, in the order of `TOKEN_COLUMNS` with
    optional ones behind them.

    Raises ValueError for an unsound trajectory: its numbers at once, its tokens when their column is asked for.
    """

    def __init__(self, trajectories: Sequence[Trajectory], numbers: Columns) -> None:
        self._trajectories = trajectories
        self._numbers = numbers
        self._offsets: Int64 = numbers["offset"]
        self._lengths: Int64 = np.diff(self._offsets)
        self._slices = list(slices_of(self._offsets, PIECE_TOKENS))
        self._active: list[Bools] = []
        self._facts = RowFacts()
        if not numbers_are_sound(numbers, self._lengths):
            raise_first(trajectories)

    def pieces(self, name: str) -> Iterator[Column]:
        """A column piece by piece; each piece is valid until the next is asked for."""
        dtype = column_dtype(name)
        take, room = _taker(name), np.empty(PIECE_TOKENS, dtype)
        lengths = self._lengths.tolist()
        for index, (first, end) in enumerate(self._slices):
            part = self._trajectories[first:end]
            arrays: list[npt.NDArray[Any]] = list(map(take, part))
            if list(map(len, arrays)) != lengths[first:end]:
                raise_first(part)
            size = int(self._offsets[end] - self._offsets[first])
            out = room[:size] if size <= PIECE_TOKENS else np.empty(size, dtype)
            piece = np.concatenate(arrays, out=out, casting="unsafe")
            if not self._look(name, index, piece):
                raise_first(part)
            yield piece

    def _look(self, name: str, index: int, piece: Column) -> bool:
        first, end = self._slices[index]
        starts = self._offsets[first:end] - self._offsets[first]
        if name == "id":
            offsets = self._offsets[first : end + 1] - self._offsets[first]
            self._facts.add_tokens(piece, offsets, self._numbers)
        if name == "loss_mask":
            self._active.append(piece != 0)
            self._facts.add_mask(self._active[index], starts)
            return mask_is_sound(self._active[index], starts)
        if name == "logprob":
            return logprobs_are_sound(piece)
        if name == "version":
            self._facts.add_versions(piece, starts)
            return versions_are_sound(piece, self._active[index])
        if name in OPTIONAL_COLUMNS:
            if name == "turn_reward":
                self._facts.add_turn_rewards(piece, starts)
            turns = np.concatenate([trajectory.turns for trajectory in self._trajectories[first:end]])
            return optional_is_sound(name, piece, self._active[index], turns, starts)
        return True

    def rows(self) -> list[Row]:
        """What the head is told, once all columns were asked for."""
        return self._facts.rows(self._numbers, self._lengths)
