"""What exactly-once means, said sequentially: no ranks, no shards, no time."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from pekoe.pipeline.data.cursor import epoch_order
from pekoe.pipeline.records import group_number


@dataclass
class Model:
    """Groups in the cursor's order; each is admitted once, may be lost and admitted again, and ends once."""

    order: dict[int, int]
    """Group -> example."""
    batch: int
    eta: int
    version: int = 0
    open: list[int] = field(default_factory=list)
    again: set[int] = field(default_factory=set)
    """Open, but lost or given up: to be issued again."""
    owed: set[int] = field(default_factory=set)
    """Open at the checkpoint that the run went back to."""
    ends: dict[int, str] = field(default_factory=dict)
    dropped: int = 0
    """Ended without rows, with a place in a batch to come."""

    @staticmethod
    def of(num_examples: int, seed: int, epochs: int, batch: int, eta: int) -> Model:
        orders = [epoch_order(num_examples, seed, epoch, True) for epoch in range(epochs)]
        groups = {group_number(e, p): int(x) for e, order in enumerate(orders) for p, x in enumerate(order)}
        return Model(groups, batch, eta)

    def is_passed_over(self, group: int) -> bool:
        skipped = {self.order[ended] for ended, how in self.ends.items() if how == "skipped"}
        return self.order[group] in skipped and group not in self.owed and group not in self.open

    def next(self) -> int | None:
        left = (g for g in self.order if g not in self.ends and g not in self.open and not self.is_passed_over(g))
        return next(left, None)

    def admit(self, group: int) -> None:
        if group in self.again:
            self.again.remove(group)
            return
        assert group == self.next(), "not in the cursor's order"
        self.open.append(group)
        self.owed.discard(group)

    def end(self, group: int, how: str) -> None:
        assert group in self.open, "ended without being admitted"
        assert group not in self.ends, "ended twice"
        self.open.remove(group)
        self.ends[group] = how

    def capacity(self) -> int:
        """Of the formula, when the step of a batch took a whole batch; without the limit of concurrency."""
        return (self.eta + 1) * self.batch - len(self.open) + len(self.again) - self.dropped

    def save(self) -> Model:
        return copy.deepcopy(self)

    def restored(self) -> Model:
        owed = {*self.open, *self.owed}
        return Model(self.order, self.batch, self.eta, self.version, [], set(), owed, dict(self.ends), self.dropped)
