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

from pekoe.kernels.packing.packing import equal_count, joint_plan

Rows = npt.NDArray[np.int64]
Lengths = npt.NDArray[Any]

Assignment = list[list[list[Rows]]]
"""[rank][minibatch][micro-batch] -> row indices."""


@dataclass(frozen=True)
class _Units:
    """Rows in a row that stay together."""

    groups: Rows
    tokens: Rows
    num_rows: Rows


def plan_batch(
    lengths: Lengths,
    groups: Lengths,
    ranks: int,
    max_tokens: int,
    max_sequences: int | None = None,
    minibatches: int = 1,
    granularity: int = 1,
    shared_tokens: Lengths | None = None,
    max_together: int | None = None,
) -> Assignment:
    """Assigns rows with token counts `lengths` and group numbers `groups` to `ranks` trainer ranks.

    Minibatches are cut by whole groups (equal numbers of groups, tokens balanced) where there are enough groups,
    else by units; there are fewer than asked for when there are fewer units. A unit is `granularity` rows in a row,
    which stay together. Micro-batches are as few as are found and balanced for ranks that meet in each of them, the
    largest first. Ties go to the lower row, so equal input gives an equal plan. Raises ValueError naming the row (or
    rows) that exceed the budget.

    With `shared_tokens` the minibatches hold the same rows as without, and rows of a group are kept together: a unit
    then is as many of them in a row as fit into a micro-batch, so that a group whose rows follow each other is one, or,
    over the budget, is cut into the fewest. `shared_tokens` says of each row how many of its tokens the unit holds only
    once (the prompt): a unit counts sum(lengths - shared_tokens) + max(shared_tokens) tokens. `max_together` is the
    most rows of such a unit.
    """
    lengths, groups = np.asarray(lengths, dtype=np.int64), np.asarray(groups)
    shared = np.zeros_like(lengths) if shared_tokens is None else np.asarray(shared_tokens, dtype=np.int64)
    if max_sequences is not None and max_sequences < granularity:
        raise ValueError(f"max_sequences_per_mb: {max_sequences} is below granularity {granularity}")
    units = _units(lengths, shared, groups, max_tokens, granularity)
    most = min((limit for limit in (max_sequences, max_together) if limit is not None), default=None)
    plan: Assignment = [[] for _ in range(ranks)]
    whole = lengths.reshape(-1, granularity).sum(axis=1)
    for chosen in _cut_minibatches(units.groups, whole, minibatches):
        rows = (chosen[:, None] * granularity + np.arange(granularity)).ravel()
        part = _Units(units.groups[chosen], units.tokens[chosen], units.num_rows[chosen])
        if shared_tokens is not None:
            part = _joined(part, (lengths - shared)[rows], shared[rows], max_tokens, most)
        placed = joint_plan(part.tokens, ranks, max_tokens, max_sequences, counts=part.num_rows)
        places = np.repeat(placed.rank * placed.num_micro_steps + placed.micro_step, part.num_rows)
        pieces = [rows[piece] for piece in _rows_of_places(places, ranks * placed.num_micro_steps)]
        for rank in range(ranks):
            plan[rank].append(pieces[rank * placed.num_micro_steps : (rank + 1) * placed.num_micro_steps])
    return plan


def _units(lengths: Rows, shared: Rows, groups: Lengths, max_tokens: int, granularity: int) -> _Units:
    """`granularity` rows each, checked against the budget."""
    for name, values in (("groups", groups), ("shared_tokens", shared)):
        if len(values) != len(lengths):
            raise ValueError(f"{name}: {len(values)} numbers for {len(lengths)} rows")
    if len(lengths) % granularity:
        raise ValueError(f"granularity: {granularity} does not divide {len(lengths)} rows")
    wrong = np.flatnonzero((shared < 0) | (shared > lengths))
    if len(wrong):
        raise ValueError(f"shared_tokens: row {wrong[0]} shares {shared[wrong[0]]} of {lengths[wrong[0]]} tokens")
    by_unit = groups.reshape(-1, granularity)
    torn = np.flatnonzero((by_unit != by_unit[:, :1]).any(axis=1))
    if len(torn):
        first = torn[0] * granularity
        raise ValueError(
            f"granularity: rows {first}..{first + granularity - 1} stay together but are of different groups"
        )
    own = (lengths - shared).reshape(-1, granularity)
    tokens = own.sum(axis=1) + shared.reshape(-1, granularity).max(axis=1, initial=0)
    over = np.flatnonzero(tokens > max_tokens)
    if len(over):
        first = int(over[0]) * granularity
        what = f"row {first}" if granularity == 1 else f"rows {first}..{first + granularity - 1}"
        raise ValueError(
            f"max_tokens_per_mb: {what} of group {groups[first]} has {tokens[over[0]]} tokens, more than {max_tokens}"
        )
    return _Units(by_unit[:, 0].astype(np.int64), tokens, np.full(len(tokens), granularity))


def _joined(units: _Units, own: Rows, shared: Rows, max_tokens: int, max_sequences: int | None) -> _Units:
    """Units in a row of the same group made one, as long as it fits."""
    joined: list[list[int]] = []  # group, own tokens, shared tokens, rows
    first_rows = np.cumsum(units.num_rows) - units.num_rows
    by_unit = (units.groups, _reduce(np.add, own, first_rows), _reduce(np.maximum, shared, first_rows), units.num_rows)
    for group, tokens, common, num_rows in np.stack(by_unit, axis=1).tolist():
        if joined and joined[-1][0] == group:
            _, before, longest, rows = joined[-1]
            fits = before + tokens + max(longest, common) <= max_tokens
            if fits and (max_sequences is None or rows + num_rows <= max_sequences):
                joined[-1] = [group, before + tokens, max(longest, common), rows + num_rows]
                continue
        joined.append([group, tokens, common, num_rows])
    found = np.array(joined, dtype=np.int64).reshape(-1, 4)
    return _Units(found[:, 0], found[:, 1] + found[:, 2], found[:, 3])


def _reduce(operation: np.ufunc, values: Rows, starts: Rows) -> Rows:
    """Of the values from each start to the next."""
    return operation.reduceat(values, starts) if len(starts) else np.zeros(0, np.int64)


def _cut_minibatches(groups: Rows, tokens: Rows, minibatches: int) -> list[Rows]:
    """Indices of the units of each minibatch, by their groups and tokens."""
    if not len(tokens):
        return []
    names, item_of_unit = np.unique(groups, return_inverse=True)
    if len(names) < minibatches:
        item_of_unit = np.arange(len(tokens))
    items = int(item_of_unit.max()) + 1
    count = min(minibatches, items)
    chosen = equal_count(np.bincount(item_of_unit, weights=tokens, minlength=items), count)
    return [np.flatnonzero(chosen[item_of_unit] == part) for part in range(count)]


def _rows_of_places(places: Rows, num_places: int) -> list[Rows]:
    """Row indices of each place, in order."""
    order = np.argsort(places, kind="stable")
    edges = np.searchsorted(places[order], np.arange(num_places + 1))
    return [order[edges[place] : edges[place + 1]] for place in range(num_places)]
