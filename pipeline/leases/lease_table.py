"""The head's books: where each group is that was given to attached worlds. No I/O, one thread.

    WAITING ──written──► OFFERED ──gone from offered/──► MISSING ──a world's beat names it──► HELD
       ▲                    ▲  └─────────────────── or at once ─────────────────────────────► │
       │                    └────────── a world that leaves puts it back ◄────────────────────┤
       └──── the holder died, or nobody named it for `patience_seconds` ◄─────────────────────┘

A group leaves the books when a notice ends it or the controller withdraws it; whoever holds it then is told to give up.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pekoe.pipeline.leases.lease_records import GroupKey, LeaseKey, LeaseName
from pekoe.pipeline.messages import Assign

NOT_OFFERED = -1


class Place(enum.Enum):
    """Where a lease is, as far as the files say."""

    WAITING = "waiting"
    """To be offered."""
    OFFERED = "offered"
    MISSING = "missing"
    """Neither offered nor named by a world: somebody has just taken it, or it got lost."""
    HELD = "held"


@dataclass(slots=True)
class Entry:
    """One group."""

    assign: Assign
    place: Place = Place.WAITING
    serial: int = NOT_OFFERED
    """Of its newest offer."""
    world: str = ""
    """HELD: by whom."""
    since: float = 0.0
    """MISSING: since when, by the head's clock."""

    @property
    def key(self) -> GroupKey:
        return self.assign.group, self.assign.try_number


class LeaseTable:
    """Groups by (group, try)."""

    def __init__(self, attempt: int, patience_seconds: float) -> None:
        self.attempt = attempt
        self.patience_seconds = patience_seconds
        """How long a lease may be missing: longer than a live world may take to name it."""
        self.entries: dict[GroupKey, Entry] = {}
        self.held: dict[str, set[GroupKey]] = {}
        """Of each world, what is HELD by it."""
        self._waiting: set[GroupKey] = set()
        self._offered: set[GroupKey] = set()
        self._missing: set[GroupKey] = set()
        self._last_serial = 0

    def add(self, assign: Assign) -> None:
        """A group is to be offered; one that is in the books already is the controller's mistake."""
        entry = Entry(assign)
        if entry.key in self.entries:
            raise AssertionError(f"group {assign.group} try {assign.try_number} was offered twice")
        self.entries[entry.key] = entry
        self._waiting.add(entry.key)

    def remove(self, key: GroupKey) -> Entry | None:
        """The group is done, or not wanted any more; None when it was so already."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._leave(entry)
        return entry

    def name(self, entry: Entry) -> LeaseName:
        """What the file of its newest offer is called."""
        assign = entry.assign
        return LeaseName(assign.group, assign.try_number, assign.min_version, self.attempt, entry.serial)

    def waiting(self) -> list[Entry]:
        """To be offered, the oldest first."""
        return [self.entries[key] for key in sorted(self._waiting)]

    def new_serial(self, entry: Entry) -> LeaseName:
        """For the next try to write its offer; what an earlier try may have left counts as another lease."""
        self._last_serial += 1
        entry.serial = self._last_serial
        return self.name(entry)

    def offered(self, entry: Entry) -> None:
        """Its file was written."""
        self._move(entry, Place.OFFERED)

    def see_offered(self, names: Collection[LeaseName], now: float) -> list[LeaseName]:
        """Takes in what lies in `offered/`; returns what should not lie there."""
        strays, there = [], set()
        for name in names:
            entry = self.entries.get(name.key)
            if entry is None or self.name(entry) != name:
                strays.append(name)
                continue
            there.add(name.key)
            if entry.place is not Place.OFFERED:
                self._move(entry, Place.OFFERED)
        for key in self._offered - there:
            self._move(self.entries[key], Place.MISSING, now=now)
        return strays

    def see_held(
        self, world: str, leases: Iterable[LeaseKey], now: float
    ) -> tuple[set[int], list[tuple[LeaseName, int]]]:
        """Takes in what a live world says that it holds.

        Returns the serials that it must give up; and newer offers, each with the serial under which the world, once
        thought dead, goes on with the group: an offer that can be taken back makes the older lease good (`revive`).
        """
        cancelled: set[int] = set()
        revivable: list[tuple[LeaseName, int]] = []
        before = set(self.held.get(world, ()))
        for group, try_number, serial in leases:
            entry = self.entries.get((group, try_number))
            if entry is None:
                cancelled.add(serial)
            elif entry.place is Place.HELD and entry.serial == serial and entry.world != world:
                # one of the two has just put it back and the other taken it: their next beats tell
                self._move(entry, Place.MISSING, now=now)
            elif entry.serial == serial or entry.place is Place.WAITING:
                before.discard(entry.key)
                entry.serial = serial
                if entry.place is not Place.HELD:
                    self._move(entry, Place.HELD, world=world)
            else:
                cancelled.add(serial)
                if entry.place is Place.OFFERED:
                    revivable.append((self.name(entry), serial))
        for key in before:
            self._move(self.entries[key], Place.MISSING, now=now)
        return cancelled, revivable

    def revive(self, world: str, key: GroupKey, serial: int) -> None:
        """The newer offer was taken back before anybody had it: the older lease is good again."""
        entry = self.entries[key]
        entry.serial = serial
        self._move(entry, Place.HELD, world=world)

    def lose(self, world: str, names: Iterable[LeaseName], now: float, *, left: bool) -> int:
        """The world is gone, and these files lay in its folder: its groups are to be offered again. Returns how many.

        What one that `left` in order had put back may be taken by another one already: that is only missing.
        """
        lost = {
            entry.key for name in names
            if (entry := self.entries.get(name.key)) is not None and self.name(entry) == name
            and (entry.place is not Place.HELD or entry.world == world)
        }  # fmt: skip
        others = self.held.get(world, set()) - lost
        for key in lost | (set() if left else others):
            self._move(self.entries[key], Place.WAITING)
        for key in others if left else ():
            self._move(self.entries[key], Place.MISSING, now=now)
        self.held.pop(world, None)
        return len(lost) if left else len(lost | others)

    def find_overdue(self, now: float) -> list[Entry]:
        """What nobody has named for too long, now to be offered again."""
        overdue = [
            entry for entry in map(self.entries.__getitem__, self._missing)
            if now - entry.since > self.patience_seconds
        ]  # fmt: skip
        for entry in overdue:
            self._move(entry, Place.WAITING)
        return overdue

    def _move(self, entry: Entry, place: Place, *, world: str = "", now: float = 0.0) -> None:
        self._leave(entry)
        entry.place, entry.world, entry.since = place, world, now
        if place is Place.HELD:
            self.held.setdefault(world, set()).add(entry.key)
        else:
            self._places()[place].add(entry.key)

    def _leave(self, entry: Entry) -> None:
        if entry.place is Place.HELD:
            self.held[entry.world].discard(entry.key)
        else:
            self._places()[entry.place].discard(entry.key)

    def _places(self) -> dict[Place, set[GroupKey]]:
        return {Place.WAITING: self._waiting, Place.OFFERED: self._offered, Place.MISSING: self._missing}
