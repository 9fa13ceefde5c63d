"""Which sequences go to which trainer rank, minibatch and micro-batch.

Pure numpy on lengths: the head plans with it before any trainer rank has read a token. Every row lands exactly once,
every micro-batch stays within the token budget, and every rank gets the same number of micro-batches of each
minibatch (some may be empty), since the ranks meet in collectives in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Lengths = npt.NDArray[Any]

Assignment = list[list[list[Rows]]]
"""[rank][minibatch][micro-batch] -> row indices."""


@dataclass(frozen=True)
class Budget:
    """What fits in one micro-batch."""

    max_tokens: int
    max_units: int | None = None


def plan_batch(
    lengths: Lengths,
    groups: Lengths,
    ranks: int,
    max_tokens: int,
    max_sequences: int | None = None,
    minibatches: int = 1,
    granularity: int = 1,
) -> Assignment:
    """Assigns rows with token counts `lengths` and group numbers `groups` to `ranks` trainer ranks.

    Minibatches are cut by whole groups (equal numbers of groups, tokens balanced) where there are enough groups,
    else by units; there are fewer than asked for when there are fewer units. A unit is `granularity` rows in a row,
    which stay together. Ties go to the lower row, so equal input gives an equal plan. Raises ValueError naming the
    row (or unit) that exceeds the budget.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    unit_groups, unit_tokens = _units(lengths, np.asarray(groups), max_tokens, granularity)
    if max_sequences is not None and max_sequences < granularity:
        raise ValueError(f"max_sequences_per_mb: {max_sequences} is below granularity {granularity}")
    budget = Budget(max_tokens, None if max_sequences is None else max_sequences // granularity)
    plan: Assignment = [[] for _ in range(ranks)]
    for units in _cut_minibatches(unit_groups, unit_tokens, minibatches):
        per_rank = [units[share] for share in _spread(unit_tokens[units], ranks)]
        bins = [_fill(unit_tokens[share], budget) for share in per_rank]
        count = max(len(filled) for filled in bins)
        for rank, share in enumerate(per_rank):
            cut = _spread_within(unit_tokens[share], count, budget) or bins[rank]
            empty = [np.zeros(0, np.int64)] * (count - len(cut))
            plan[rank].append([_rows(share[piece], granularity) for piece in (*cut, *empty)])
    return plan


def _units(lengths: Rows, groups: Lengths, max_tokens: int, granularity: int) -> tuple[Rows, Rows]:
    """Group and tokens of each unit, checked against the budget."""
    if len(groups) != len(lengths):
        raise ValueError(f"groups: {len(groups)} numbers for {len(lengths)} rows")
    if len(lengths) % granularity:
        raise ValueError(f"granularity: {granularity} does not divide {len(lengths)} rows")
    by_unit = groups.reshape(-1, granularity)
    torn = np.flatnonzero((by_unit != by_unit[:, :1]).any(axis=1))
    if len(torn):
        first = torn[0] * granularity
        raise ValueError(
            f"granularity: rows {first}..{first + granularity - 1} stay together but are of different groups"
        )
    tokens = lengths.reshape(-1, granularity).sum(axis=1)
    over = np.flatnonzero(tokens > max_tokens)
    if len(over):
        first = int(over[0]) * granularity
        what = f"row {first}" if granularity == 1 else f"rows {first}..{first + granularity - 1}"
        raise ValueError(
            f"max_tokens_per_mb: {what} of group {groups[first]} has {tokens[over[0]]} tokens, more than {max_tokens}"
        )
    return by_unit[:, 0].astype(np.int64), tokens


def _rows(units: Rows, granularity: int) -> Rows:
    """Row indices of units, in order."""
    return (np.sort(units)[:, None] * granularity + np.arange(granularity)).reshape(-1)


def _cut_minibatches(groups: Rows, tokens: Rows, minibatches: int) -> list[Rows]:
    """Unit indices of each minibatch."""
    if not len(tokens):
        return []
    names, group_of_unit = np.unique(groups, return_inverse=True)
    if len(names) < minibatches:
        group_of_unit = np.arange(len(tokens))
    items = int(group_of_unit.max()) + 1
    count = min(minibatches, items)
    item_tokens = np.bincount(group_of_unit, weights=tokens, minlength=items).astype(np.int64)
    largest = -(-items // count)
    chosen = _longest_first(item_tokens, count, capacity=largest, num_full=items - count * (largest - 1))
    return [np.flatnonzero(chosen[group_of_unit] == part) for part in range(count)]


def _longest_first(tokens: Rows, bins: int, capacity: int | None = None, num_full: int = 0) -> Rows:
    """Bin of each item: the longest item goes to the emptiest bin. With a `capacity`, `num_full` bins take that many
    items and the others one fewer."""
    chosen = np.zeros(len(tokens), np.int64)
    load, count = np.zeros(bins), np.zeros(bins, np.int64)
    for item in np.argsort(-tokens, kind="stable"):
        key = load if capacity is None else np.where(_has_room(count, capacity, num_full), load, np.inf)
        # Equal loads: fewer items first, so that zero-length items spread too.
        best = int(np.lexsort((count, key))[0])
        chosen[item] = best
        load[best] += tokens[item]
        count[best] += 1
    return chosen


def _has_room(count: Rows, capacity: int, num_full: int) -> npt.NDArray[np.bool_]:
    full = count >= capacity
    last_seat = count == capacity - 1
    room: npt.NDArray[np.bool_] = ~full & ~(last_seat & (int(full.sum()) >= num_full))
    return room


def _spread(tokens: Rows, bins: int) -> list[Rows]:
    """Item indices of each of `bins` bins, balanced."""
    chosen = _longest_first(tokens, bins)
    return [np.flatnonzero(chosen == part) for part in range(bins)]


def _spread_within(tokens: Rows, bins: int, budget: Budget) -> list[Rows] | None:
    """`_spread` if it happens to keep the budget, else None."""
    if not bins:
        return []
    parts = _spread(tokens, bins)
    for part in parts:
        if tokens[part].sum() > budget.max_tokens or (budget.max_units is not None and len(part) > budget.max_units):
            return None
    return parts


def _fill(tokens: Rows, budget: Budget) -> list[Rows]:
    """Best-fit decreasing: item indices of as few bins as it finds, each within the budget."""
    room = np.zeros(len(tokens), np.int64)
    seats = np.zeros(len(tokens), np.int64)
    chosen = np.zeros(len(tokens), np.int64)
    used = 0
    for item in np.argsort(-tokens, kind="stable"):
        fits = (room[:used] >= tokens[item]) & (seats[:used] > 0)
        candidates = np.flatnonzero(fits)
        if len(candidates):
            best = int(candidates[np.argmin(room[candidates])])
        else:
            best, used = used, used + 1
            room[best] = budget.max_tokens
            seats[best] = len(tokens) if budget.max_units is None else budget.max_units
        room[best] -= tokens[item]
        seats[best] -= 1
        chosen[item] = best
    return [np.flatnonzero(chosen == part) for part in range(used)]
