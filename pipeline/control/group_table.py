"""Every admitted group that is not yet consumed, filtered or skipped, and the rule that makes a batch of them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from pekoe.pipeline.messages import PublishedGroup, Row


class GroupState(enum.Enum):
    """RUNNING -> FINISHED -> READY; a group leaves the table when it is taken into a batch, rejected or dropped."""

    RUNNING = "running"
    FINISHED = "finished"
    """Its episodes are done; it lies in an open shard on its rank."""
    READY = "ready"
    """Its shard is published."""


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
    shard: str = ""
    rows: tuple[Row, ...] = ()


@dataclass
class GroupTable:
    """Groups by number. READY ones keep the order in which they completed."""

    eta: int | None
    batch: int
    groups: dict[int, OutstandingGroup] = field(default_factory=dict)
    ready: dict[int, OutstandingGroup] = field(default_factory=dict)
    """In order of completion (a dict keeps it)."""

    def admit(self, group: OutstandingGroup) -> None:
        if group.number in self.groups:
            raise AssertionError(f"group {group.number} was admitted twice")
        self.groups[group.number] = group

    def find(self, number: int, try_number: int) -> OutstandingGroup | None:
        """The group, unless it left the table or was issued again since (a late message of a dropped try)."""
        group = self.groups.get(number)
        return group if group is not None and group.try_number == try_number else None

    def finish(self, number: int, try_number: int) -> OutstandingGroup | None:
        group = self.find(number, try_number)
        if group is None or group.state is not GroupState.RUNNING:
            return None
        group.state = GroupState.FINISHED
        return group

    def publish(self, shard: str, published: PublishedGroup) -> OutstandingGroup | None:
        group = self.find(published.group, published.try_number)
        if group is None or group.state is GroupState.READY:
            return None
        group.state, group.shard, group.rows = GroupState.READY, shard, published.rows
        self.ready[group.number] = group
        return group

    def remove(self, number: int) -> OutstandingGroup:
        self.ready.pop(number, None)
        return self.groups.pop(number)

    def required(self, version: int) -> list[OutstandingGroup]:
        """Groups that must go into the step at `version`: one step later they would be too old."""
        if self.eta is None:
            return []
        return [g for g in self.groups.values() if g.admitted_version <= version - self.eta]

    def waiting_for(self, version: int, want: int | None = None) -> tuple[list[OutstandingGroup], int]:
        """What the batch at `version` still lacks: required groups not READY, and the number of READY ones to come."""
        want = self.batch if want is None else want
        missing = [g for g in self.required(version) if g.state is not GroupState.READY]
        return missing, max(0, want - len(self.ready))

    def choose(self, version: int, want: int | None = None) -> list[OutstandingGroup] | None:
        """The batch of the step at `version`, sorted by admission number, or None while it is not complete.

        All required groups are in it; the rest is filled in order of completion. Nothing is taken out yet.
        """
        want = self.batch if want is None else want
        missing, lacking = self.waiting_for(version, want)
        if missing or lacking:
            return None
        chosen = {g.number: g for g in self.required(version)}
        if len(chosen) > want:
            raise AssertionError(f"{len(chosen)} groups must go into the batch of {want} at version {version}")
        for group in self.ready.values():
            if len(chosen) >= want:
                break
            chosen.setdefault(group.number, group)
        return [chosen[number] for number in sorted(chosen)]

    def ranks_to_flush(self, version: int, want: int | None = None) -> set[int]:
        """Ranks whose open shards hold what the batch lacks, once publishing them would complete it."""
        want = self.batch if want is None else want
        finished = [g for g in self.groups.values() if g.state is GroupState.FINISHED]
        missing, lacking = self.waiting_for(version, want)
        if not finished or any(g.state is GroupState.RUNNING for g in missing) or len(finished) < lacking:
            return set()
        needed = {g.number for g in missing}
        for group in sorted(finished, key=lambda g: g.number):
            if len(needed) >= max(lacking, len(missing)):
                break
            needed.add(group.number)
        return {g.rank for g in finished if g.number in needed}

    def in_shard(self, shard: str) -> list[OutstandingGroup]:
        return [g for g in self.ready.values() if g.shard == shard]

    def oldest(self) -> OutstandingGroup | None:
        return min(self.groups.values(), key=lambda g: g.since, default=None)


def row_staleness(groups: Iterable[OutstandingGroup], version: int) -> list[int]:
    """Age in steps of the oldest token of each row, when trained on at `version`."""
    return [version - row.min_version for group in groups for row in group.rows]
