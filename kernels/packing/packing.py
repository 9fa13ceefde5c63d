"""Plans: which sequences go together in a bin, on a rank, in a micro-batch.

All take numpy arrays or CPU tensors of one value per item and give int64 numpy arrays. A plan depends on nothing but
its arguments: of equal items the first comes first, whatever the implementation and the machine. Lengths are what is
budgeted, costs (at least 0, float64 in the sums) what is balanced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pekoe.kernels.registry import kernel

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Barrier = Literal["micro_step", "step"]
UNLIMITED = int(np.iinfo(np.int64).max)
LARGEST_SUM = 2**53
"""Of lengths: whole numbers up to it are exact in float64, too."""


@dataclass(frozen=True)
class JointPlan:
    """Where each row goes. Every rank has `num_micro_steps` micro-batches; some may be empty."""

    rank: Int64
    micro_step: Int64
    num_micro_steps: int


def best_fit(lengths: Any, capacity: int, max_items: int | None = None) -> Int64:
    """Bin of each item, by best fit decreasing: few bins that hold at most `capacity` and `max_items` items.

    The longest item comes first. It goes into the fullest bin that has room (equal: the lower number), else into a new
    one. Bins are numbered from 0 in the order in which they were opened. Raises ValueError naming the item that is
    longer than `capacity`.
    """
    sizes = _whole_numbers("lengths", lengths)
    seats = _at_least_one("max_items", max_items)
    _check_fits(sizes, capacity, "capacity")
    bins: Int64 = kernel("packing.best_fit")(sizes, min(int(capacity), UNLIMITED), seats)
    return bins


def karmarkar_karp(costs: Any, num_parts: int) -> Int64:
    """Part of each item: parts of nearly equal cost, whatever their numbers of items (largest differencing method,
    k-way). Part 0 is the heaviest."""
    checked = _costs("costs", costs)
    parts: Int64 = kernel("packing.karmarkar_karp")(checked, _at_least_one("num_parts", num_parts))
    return parts


def equal_count(costs: Any, num_parts: int) -> Int64:
    """Part of each item: parts of nearly equal cost whose numbers of items differ by at most 1 (longest first, then
    exchanges of two items between the heaviest part and a light one)."""
    checked = _costs("costs", costs)
    parts: Int64 = kernel("packing.equal_count")(checked, _at_least_one("num_parts", num_parts))
    return parts


def joint_plan(
    lengths: Any,
    num_ranks: int,
    max_tokens: int,
    max_sequences: int | None = None,
    granularity: int = 1,
    barrier: Barrier = "micro_step",
    costs: Any = None,
    counts: Any = None,
) -> JointPlan:
    """Rows -> ranks and micro-batches of at most `max_tokens` tokens and `max_sequences` sequences each.

    Every rank gets the same number of micro-batches, as few as are found; among those plans `costs` (default: the
    lengths) are balanced, for what a step waits for:

    - `barrier="micro_step"`: ranks meet in each micro-batch (sharded parameters, expert parallelism): the sum over
      micro-steps of the costliest rank is low.
    - `barrier="step"`: they only meet at the end (replicated parameters): the cost of the costliest rank is low.

    `granularity` rows in a row stay together. `counts` says how many sequences each row is (default 1). The costliest
    micro-batches come first. Raises ValueError naming the row that exceeds a limit.
    """
    sizes = _whole_numbers("lengths", lengths)
    if granularity < 1 or len(sizes) % granularity:
        raise ValueError(f"granularity: {granularity} does not divide {len(sizes)} rows")
    if barrier not in get_args(Barrier):
        raise ValueError(f"barrier: {barrier!r} is not allowed; allowed: {', '.join(get_args(Barrier))}")
    ranks, seats = _at_least_one("num_ranks", num_ranks), _at_least_one("max_sequences", max_sequences)
    weights = sizes.astype(np.float64) if costs is None else _costs("costs", costs, len(sizes))
    sequences = None if counts is None else _whole_numbers("counts", counts, len(sizes))
    if granularity > 1:
        sizes = sizes.reshape(-1, granularity).sum(axis=1)
        weights = weights.reshape(-1, granularity).sum(axis=1)
        sequences = None if sequences is None else sequences.reshape(-1, granularity).sum(axis=1)
    _check_fits(sizes, max_tokens, "max_tokens", granularity)
    if max_sequences is None:
        sequences = None
    elif sequences is None and seats < granularity:
        raise ValueError(f"max_sequences: {max_sequences} is below granularity {granularity}")
    elif sequences is None:
        seats //= granularity
    else:
        _check_fits(sequences, seats, "max_sequences", granularity, "sequences")
        if sequences.max(initial=0) == sequences.min(initial=UNLIMITED) > 0:
            seats, sequences = seats // int(sequences[0]), None
    rank, step, num_steps = kernel("packing.joint_plan")(
        sizes, weights, sequences, ranks, min(int(max_tokens), UNLIMITED), seats, barrier == "micro_step"
    )
    return JointPlan(np.repeat(rank, granularity), np.repeat(step, granularity), num_steps)


def _whole_numbers(name: str, values: Any, num_rows: int | None = None) -> Int64:
    found = _one_dimension(name, values, num_rows)
    if len(found) and found.dtype.kind not in "iu":
        raise ValueError(f"{name}: {found.dtype} is not allowed; allowed: whole numbers")
    whole = np.ascontiguousarray(found, dtype=np.int64)
    if whole.min(initial=0) < 0:
        item = int(np.argmax(whole < 0))
        raise ValueError(f"{name}: item {item} is {whole[item]}; allowed: at least 0")
    if whole.sum(dtype=np.float64) > LARGEST_SUM:
        raise ValueError(f"{name}: a sum of {whole.sum(dtype=np.float64):.3g} is not allowed; allowed: {LARGEST_SUM}")
    return whole


def _costs(name: str, values: Any, num_rows: int | None = None) -> Float64:
    costs = np.ascontiguousarray(_one_dimension(name, values, num_rows), dtype=np.float64)
    wrong = ~((costs >= 0) & (costs < np.inf))
    if wrong.any():
        item = int(np.argmax(wrong))
        raise ValueError(f"{name}: item {item} is {costs[item]}; allowed: finite and at least 0")
    # No -0.0, whose bits are those of a large number.
    return costs + 0.0 if np.signbit(costs).any() else costs


def _one_dimension(name: str, values: Any, num_rows: int | None) -> npt.NDArray[Any]:
    found = np.asarray(values)
    if found.ndim != 1:
        raise ValueError(f"{name}: {found.ndim} dimensions are not allowed; allowed: one value per item")
    if num_rows is not None and len(found) != num_rows:
        raise ValueError(f"{name}: {len(found)} values for {num_rows} rows")
    return found


def _at_least_one(name: str, value: int | None) -> int:
    if value is not None and value < 1:
        raise ValueError(f"{name}: {value} is not allowed; allowed: at least 1")
    return UNLIMITED if value is None else int(value)


def _check_fits(sizes: Int64, limit: int, name: str, granularity: int = 1, what: str = "tokens") -> None:
    if not (sizes > limit).any():
        return
    item = int(np.argmax(sizes > limit))
    rows = (
        f"item {item} has" if granularity == 1 else f"items {item * granularity}..{(item + 1) * granularity - 1} have"
    )
    raise ValueError(f"{name}: {rows} {sizes[item]} {what}, more than {limit}")
