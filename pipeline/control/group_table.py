"""Every admitted group that is not yet consumed, filtered or skipped, and the rule that makes a batch of them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pekoe.pipeline.messages import PublishedGroup, Row


class GroupState(enum.Enum):
    """RUNNING -> FINISHED -> READY; a group leaves the table when it is taken into a batch, rejected or given up."""

    RUNNING = "running"
    FINISHED = "finished"
    """Its episodes are done; it lies in the open shard of its holder."""
    READY = "ready"
    """Its shard is published."""
    DROPPED = "dropped"
    """It has ended without rows, yet it has a place in a batch, in the order of completion."""


@dataclass(slots=True)
class OutstandingGroup:
    """One admitted group."""

    number: int
    try_number: int
    example: int
    admitted_version: int
    rank: int
    since: float
    """When it was admitted (monotonic seconds)."""
    state: GroupState = GroupState.RUNNING
    holder: int = -1
    """Rank in whose open shard it lies (its own, or its node's writer); -1 while it runs."""
    flush_asked: bool = False
    """Its holder was told to publish the shard in which it lies."""
    shard: str = ""
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Selection:
    """A batch in the making."""

    chosen: list[OutstandingGroup]
    lacking: int
    """Groups still to come before the batch is complete."""
    lacking_urgent: int = 0
    """Of these, groups due by `urgent_deadline` that must be in this batch."""
    urgent_deadline: int = 0


@dataclass
class GroupTable:
    """Groups by number. READY ones keep the order in which they completed."""

    eta: int | None
    batch: int
    groups: dict[int, OutstandingGroup] = field(default_factory=dict)
    ready: dict[int, OutstandingGroup] = field(default_factory=dict)
    """In order of completion (a dict keeps it); DROPPED ones among them."""
    dropped: list[int] = field(default_factory=list)
    """DROPPED ones, in order of completion; they are no more in `groups`."""
    finished: dict[int, OutstandingGroup] = field(default_factory=dict)
    """FINISHED ones, in order of completion."""
    due: Counter[int] = field(default_factory=Counter)
    """Groups by deadline; empty when eta is None."""
    _num_unasked: int = 0
    """FINISHED groups whose holder was not asked yet: without any there is nothing to flush."""
    _num_busy: Counter[int] = field(default_factory=Counter)
    """Groups still to be published, by the rank that they are on."""

    def admit(self, group: OutstandingGroup) -> None:
        if group.number in self.groups:
            raise AssertionError(f"group {group.number} was admitted twice")
        self.groups[group.number] = group
        self._num_busy[group.rank] += 1
        if self.eta is not None:
            self.due[self._deadline(group)] += 1

    def find(self, number: int, try_number: int) -> OutstandingGroup | None:
        """The group, unless it left the table or was issued again since (a late message of a dropped try)."""
        group = self.groups.get(number)
        return group if group is not None and group.try_number == try_number else None

    def finish(self, number: int, try_number: int, holder: int | None = None) -> OutstandingGroup | None:
        """`holder`: the rank whose open shard it lies in; None: the one that sampled it."""
        group = self.find(number, try_number)
        if group is None or group.state is not GroupState.RUNNING:
            return None
        self._leave(group)
        group.state, group.holder = GroupState.FINISHED, group.rank if holder is None else holder
        self.finished[number] = group
        self._num_unasked += 1
        self._num_busy[group.holder] += 1
        return group

    def publish(self, shard: str, published: PublishedGroup) -> OutstandingGroup | None:
        group = self.find(published.group, published.try_number)
        if group is None or group.state is GroupState.READY:
            return None
        self._leave(group)
        group.state, group.shard, group.rows = GroupState.READY, shard, published.rows
        self.ready[group.number] = group
        return group

    def remove(self, number: int) -> OutstandingGroup:
        group = self.groups.pop(number)
        self._leave(group)
        if self.eta is not None:
            self.due[self._deadline(group)] -= 1
            if not self.due[self._deadline(group)]:
                del self.due[self._deadline(group)]
        return group

    @property
    def num_ready(self) -> int:
        """Groups that wait to be trained on, without the places of dropped ones."""
        return len(self.ready) - len(self.dropped)

    def drop(self, number: int) -> None:
        """A running group ends without rows and keeps its place in a batch."""
        group = self.remove(number)
        group.state = GroupState.DROPPED
        self.ready[number] = group
        self.dropped.append(number)

    def restore_dropped(self, count: int) -> None:
        """Places of groups that were dropped before a checkpoint: the first in order of completion."""
        for number in range(-count, 0):
            self.ready[number] = OutstandingGroup(number, 0, -1, -1, -1, 0.0, GroupState.DROPPED)
            self.dropped.append(number)

    def use_dropped(self, most: int) -> int:
        """The batch at hand has used the places of so many dropped groups, as far as there are any; gives their
        number."""
        used, self.dropped = self.dropped[:most], self.dropped[most:]
        for number in used:
            del self.ready[number]
        return len(used)

    def _leave(self, group: OutstandingGroup) -> None:
        """Out of what is kept for groups in its state."""
        if group.state is GroupState.READY:
            self.ready.pop(group.number)
            return
        rank = group.rank
        if group.state is GroupState.FINISHED:
            self.finished.pop(group.number)
            self._num_unasked -= not group.flush_asked
            rank = group.holder
        self._num_busy[rank] -= 1
        if not self._num_busy[rank]:
            del self._num_busy[rank]

    def choose(self, version: int, want: int | None = None) -> list[OutstandingGroup] | None:
        """The batch of the step at `version`, sorted by admission number, or None while it is not complete. It is
        smaller than `want` by the places that dropped groups have, and may be empty.

        Nothing is taken out yet.
        """
        if len(self.ready) < (self.batch if want is None else want):
            return None
        selection = self.select(version, want, list(self.ready.values()))
        if selection.lacking:
            return None
        return sorted((g for g in selection.chosen if g.state is GroupState.READY), key=lambda g: g.number)

    def ranks_to_flush(self, version: int, want: int | None = None) -> set[int]:
        """Ranks whose open shards hold what the batch lacks, once publishing them would complete it.

        A rank is named once for what it holds now.
        """
        if not self._num_unasked or len(self.ready) + len(self.finished) < (self.batch if want is None else want):
            return set()
        selection = self.select(version, want, [*self.ready.values(), *self.finished.values()])
        if selection.lacking:
            return set()
        ranks = {g.holder for g in selection.chosen if g.state is GroupState.FINISHED and not g.flush_asked}
        for group in self.finished.values():
            if not group.flush_asked and group.holder in ranks:
                group.flush_asked = True
                self._num_unasked -= 1
        return ranks

    def overdue(self, version: int, want: int | None = None) -> list[OutstandingGroup]:
        """RUNNING groups that hold up the step at `version` although enough others are ready, oldest first."""
        selection = self.select(version, want, list(self.ready.values()))
        if not selection.lacking_urgent:
            return []
        running = [
            g for g in self.groups.values()
            if g.state is GroupState.RUNNING and self._deadline(g) <= selection.urgent_deadline
        ]  # fmt: skip
        return sorted(running, key=lambda g: (g.admitted_version, g.number))[: selection.lacking_urgent]

    def select(self, version: int, want: int | None, candidates: list[OutstandingGroup]) -> Selection:
        """Chooses from `candidates` (in order of completion) so that no group can ever become too old.

        A group admitted at version a must be trained on at step a + eta at the latest: its deadline. Each step takes
        `batch` groups, so for every deadline d at most (d - version) * batch groups due by d may be left after this
        step; what exceeds that must be in it. (Taking only what is due *now* is not enough: young groups that
        complete early would push old ones together into one later step.) The rest is filled in order of completion:
        dropped groups, which are never due, have their places there.
        """
        want = self.batch if want is None else want
        chosen: dict[int, OutstandingGroup] = {}
        if self.eta is not None:
            due_by = 0
            for deadline in range(version, version + self.eta + 1):
                due_by += self.due[deadline]
                needed = due_by - (deadline - version) * self.batch
                for group in candidates:
                    if len(chosen) >= needed:
                        break
                    if group.state is not GroupState.DROPPED and self._deadline(group) <= deadline:
                        chosen.setdefault(group.number, group)
                if len(chosen) < needed:
                    return Selection(list(chosen.values()), want - len(chosen), needed - len(chosen), deadline)
        if len(chosen) > want:
            raise AssertionError(f"{len(chosen)} groups must go into the batch of {want} at version {version}")
        for group in candidates:
            if len(chosen) >= want:
                break
            chosen.setdefault(group.number, group)
        return Selection(list(chosen.values()), want - len(chosen))

    def has_room(self, admitted_version: int, version: int) -> bool:
        """Whether one more group of this age could still be trained on in time, beside those that are there."""
        if self.eta is None:
            return True
        own = admitted_version + self.eta
        due_by = sum(count for deadline, count in self.due.items() if deadline < own)
        for deadline in range(own, version + self.eta + 1):
            due_by += self.due[deadline]
            if due_by >= (deadline - version + 1) * self.batch:
                return False
        return own >= version

    def _deadline(self, group: OutstandingGroup) -> int:
        assert self.eta is not None
        return group.admitted_version + self.eta

    def running(self) -> list[OutstandingGroup]:
        return [g for g in self.groups.values() if g.state is GroupState.RUNNING]

    def busy_ranks(self) -> list[int]:
        """Ranks that groups still to be published are on."""
        return sorted(self._num_busy)

    def shards(self) -> set[str]:
        """Shards that READY groups lie in."""
        return {g.shard for g in self.ready.values() if g.state is GroupState.READY}

    def in_shard(self, shard: str) -> list[OutstandingGroup]:
        return [g for g in self.ready.values() if g.shard == shard]

    def oldest(self) -> OutstandingGroup | None:
        return min(self.groups.values(), key=lambda g: g.since, default=None)


def row_staleness(groups: Iterable[OutstandingGroup], version: int) -> list[int]:
    """Age in steps of the oldest token of each row, when trained on at `version`."""
    return [version - row.min_version for group in groups for row in group.rows]
