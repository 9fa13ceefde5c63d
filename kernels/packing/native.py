"""The packing plans in C (`native/bin_packing.c`, `karmarkar_karp.c`, `equal_count.c`, `joint_plan.c`); `reference.py`
says what they mean."""

from __future__ import annotations

import numpy as np

from pekoe.kernels.native.native_library import FLAG, POINTER, SIZE, NativeFunctions, pointer
from pekoe.kernels.packing import reference
from pekoe.kernels.packing.reference import Float64, Int64, Plan

LARGEST_BIN = 1 << 28
"""Room that a bin really uses up; beyond it, sets of rooms take too much memory."""

FUNCTIONS = NativeFunctions(
    {
        "best_fit": (SIZE, POINTER, SIZE, SIZE, POINTER, POINTER),
        "karmarkar_karp": (SIZE, POINTER, SIZE, POINTER),
        "equal_count": (SIZE, POINTER, SIZE, POINTER),
        "joint_plan": (SIZE, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, FLAG, POINTER, POINTER, POINTER),
    },
    FLAG,
)


def best_fit(lengths: Int64, capacity: int, max_items: int) -> Int64:
    if _used(lengths, capacity) > LARGEST_BIN:
        return reference.best_fit(lengths, capacity, max_items)
    bins, num_bins = np.empty(len(lengths), np.int64), np.empty(1, np.int64)
    _check(FUNCTIONS["best_fit"](
        len(lengths), pointer(lengths), capacity, max_items, pointer(bins), pointer(num_bins)
    ))  # fmt: skip
    return bins


def karmarkar_karp(costs: Float64, num_parts: int) -> Int64:
    parts = np.empty(len(costs), np.int64)
    _check(FUNCTIONS["karmarkar_karp"](len(costs), pointer(costs), num_parts, pointer(parts)))
    return parts


def equal_count(costs: Float64, num_parts: int) -> Int64:
    parts = np.empty(len(costs), np.int64)
    _check(FUNCTIONS["equal_count"](len(costs), pointer(costs), num_parts, pointer(parts)))
    return parts


def joint_plan(
    lengths: Int64,
    costs: Float64,
    counts: Int64 | None,
    num_ranks: int,
    max_tokens: int,
    max_sequences: int,
    every_step: bool,
) -> Plan:
    if _used(lengths, max_tokens) > LARGEST_BIN:
        return reference.joint_plan(lengths, costs, counts, num_ranks, max_tokens, max_sequences, every_step)
    rank, step, num_steps = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64), np.empty(1, np.int64)
    _check(FUNCTIONS["joint_plan"](
        len(lengths), pointer(lengths), pointer(costs), None if counts is None else pointer(counts), num_ranks,
        max_tokens, max_sequences, every_step, pointer(rank), pointer(step), pointer(num_steps),
    ))  # fmt: skip
    return rank, step, int(num_steps[0])


def _used(lengths: Int64, capacity: int) -> int:
    """What a bin can hold at most."""
    return min(capacity, int(lengths.sum()))


def _check(status: int) -> None:
    if status:
        raise MemoryError("packing: no memory for the plan")
