"""From a chosen batch to what each trainer rank computes: which rows train, plans, denominators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pekoe.pipeline.control.group_table import OutstandingGroup
from pekoe.pipeline.messages import Plan, PlannedRow, Row
from pekoe.pipeline.records import Int64, UInt8

Assignment = Sequence[Sequence[Sequence[Iterable[int]]]]
"""[rank][minibatch][micro-batch] -> indices of rows."""
ChooseRows = Callable[[UInt8], UInt8]
"""Which rows were truncated [N] -> which ones train [N]."""
PlanRows = Callable[[Int64, Int64, Int64], Assignment]
"""(lengths, groups, tokens with which all rows of the group begin alike) [N] of the rows that train -> assignment over
all trainer ranks."""


@dataclass(frozen=True)
class StepRows:
    """The rows of a batch in one flat order (groups by admission number, rows by their place in the shard)."""

    groups: tuple[OutstandingGroup, ...]
    rows: tuple[tuple[OutstandingGroup, Row], ...]
    trains: UInt8  # [N]


def rows_of(groups: Sequence[OutstandingGroup], choose_rows: ChooseRows) -> StepRows:
    """All rows of a batch, which may be empty, and which of them train."""
    rows = tuple((group, row) for group in groups for row in group.rows)
    truncated = np.array([row.truncated for _, row in rows], dtype=np.uint8)
    return StepRows(tuple(groups), rows, choose_rows(truncated))


def make_plans(batch: StepRows, plan_rows: PlanRows, version: int, round_number: int) -> list[Plan]:
    """One Plan per trainer rank, with denominators over all of them. Without a row that trains there are no
    minibatches."""
    training = np.flatnonzero(batch.trains)
    lengths = np.array([batch.rows[i][1].length for i in training], dtype=np.int64)
    numbers = np.array([batch.rows[i][0].number for i in training], dtype=np.int64)
    shared = np.array([_num_shared(batch.rows[i][0]) for i in training], dtype=np.int64)
    assignment = plan_rows(lengths, numbers, shared)
    num_minibatches = len(assignment[0])
    num_active = [0] * num_minibatches
    num_sequences = [0] * num_minibatches
    plans = []
    for minibatches in assignment:
        shards: dict[str, int] = {}
        planned: list[tuple[tuple[PlannedRow, ...], ...]] = []
        for m, micro_batches in enumerate(minibatches):
            cut: list[tuple[PlannedRow, ...]] = []
            for indices in micro_batches:
                chosen = []
                for index in indices:
                    i = int(training[index])
                    group, row = batch.rows[i]
                    shard = shards.setdefault(group.shard, len(shards))
                    chosen.append(PlannedRow(shard, row.row, group.number, row.length))
                    num_active[m] += row.num_active
                    num_sequences[m] += 1
                cut.append(tuple(chosen))
            planned.append(tuple(cut))
        plans.append((tuple(shards), tuple(planned)))
    all_groups = tuple(sorted({int(number) for number in numbers}))
    return [
        Plan(version, round_number, shards, planned, all_groups, tuple(num_active), tuple(num_sequences))
        for shards, planned in plans
    ]


def _num_shared(group: OutstandingGroup) -> int:
    """Tokens with which all rows of a group begin alike; 0 for a row by itself."""
    return min((row.num_shared for row in group.rows[1:]), default=0)
