"""The plan of a batch whose rows share the beginning of their group: whole groups, or parts of them where that balances
better.

Groups that stay whole compute their beginning once, but few of them cannot be spread evenly over many ranks, which wait
for each other in every micro-batch. So several plans are made, with groups whole, in halves, in quarters and row by
row, and the one is taken that leaves the least to compute to the ranks that have most.
"""

from __future__ import annotations

import numpy as np

from pekoe.pipeline.batch.plan import Assignment, Lengths, Rows, plan_batch

PARTS = (1, 2, 4)
"""Into how many parts of rows a group is cut, beside row by row."""


def plan_shared(
    lengths: Lengths,
    groups: Lengths,
    shared: Lengths,
    ranks: int,
    max_tokens: int,
    max_sequences: int | None = None,
    minibatches: int = 1,
    granularity: int = 1,
) -> Assignment:
    """As `plan_batch`, of rows of which all of a group begin with the same `shared` tokens; rows of a group follow each
    other. Micro-batches hold at most `max_tokens` tokens that are computed."""
    lengths, groups, shared = (np.asarray(numbers, dtype=np.int64) for numbers in (lengths, groups, shared))
    largest = int(np.unique(groups, return_counts=True)[1].max(initial=0))
    sizes = {-(-largest // parts) for parts in PARTS} | {granularity} if ranks > 1 else {max(largest, 1)}
    plans = [
        plan_batch(
            lengths,
            groups,
            ranks,
            max_tokens,
            max_sequences,
            minibatches,
            granularity,
            shared_tokens=shared,
            max_together=size,
        )
        for size in sorted(sizes, reverse=True)
    ]
    return min(plans, key=lambda plan: longest_path(plan, lengths, groups, shared))


def longest_path(plan: Assignment, lengths: Rows, groups: Rows, shared: Rows) -> int:
    """Tokens that are computed one after the other: in each micro-batch those of the rank that has most."""
    return sum(
        max(num_computed(rows, lengths, groups, shared) for rows in pieces)
        for of_ranks in zip(*plan, strict=True)
        for pieces in zip(*of_ranks, strict=True)
    )


def num_computed(rows: Rows, lengths: Rows, groups: Rows, shared: Rows) -> int:
    """Tokens that a model runs on for a micro-batch."""
    _, firsts = np.unique(groups[rows], return_index=True)
    own = lengths[rows] - shared[rows]
    return int(own.sum() + shared[rows][firsts].sum())
