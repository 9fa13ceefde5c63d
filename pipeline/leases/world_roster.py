"""The head's list of attached worlds: who is there, what each said last, who has gone silent."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.leases import lease_files
from pekoe.pipeline.leases.lease_records import (
    AttachedWorld,
    WorldState,
    is_world_name,
    world_file,
    world_folder,
)
from pekoe.pipeline.run_directory import RunDirectory

logger = logging.getLogger(__name__)


@dataclass
class SeenWorld:
    """A folder in `leases/`."""

    name: str
    state: WorldState | None = None
    """None: nothing could be read yet."""
    silent_seconds: float = 0.0
    """Since its counter last changed, but for times in which the head itself did not look."""
    next_look: float = 0.0
    ended: set[int] = field(default_factory=set)
    """Serials that it told the end of, until it stops naming them."""
    cancelled: set[int] = field(default_factory=set)
    """Serials that it must give up, until it stops naming them."""


class WorldRoster:
    """Reads each world's file every `look_seconds`, and counts silence by the head's own clock."""

    def __init__(self, run: RunDirectory, attempt: int, *, lease_seconds: float, look_seconds: float) -> None:
        self.run = run
        self.attempt = attempt
        self.lease_seconds = lease_seconds
        self.look_seconds = look_seconds
        self.worlds: dict[str, SeenWorld] = {}
        self.watched_seconds = 0.0
        """For how long the worlds have been watched in all: the clock by which anything of theirs is overdue."""
        self._last_pass: float | None = None

    def follows(self, world: SeenWorld) -> bool:
        """Whether it can work for this attempt."""
        return world.state is not None and world.state.attempt == self.attempt and not world.state.left

    def look(self, now: float) -> Iterator[SeenWorld]:
        """One listing, and one small file of each world whose turn it is; yields worlds with something new to say.

        While the head was suspended, or stuck in its disk, nobody was watched: the time between two passes counts only
        up to a quarter of the lease. Nor does it count as silence that the disk refuses to let a file be read.
        """
        elapsed = 0.0 if self._last_pass is None else min(now - self._last_pass, self.lease_seconds / 4)
        self._last_pass = now
        names, errors = lease_files.names_in(self.run.leases), []
        self.watched_seconds += elapsed
        for name in names:
            if name.endswith(files.DISCARDED):
                files.put_away(self.run.leases / name)
            elif is_world_name(name) and name not in self.worlds:
                self.worlds[name] = SeenWorld(name)
        for world in self.worlds.values():
            if now < world.next_look:
                world.silent_seconds += elapsed
                continue
            try:
                state = lease_files.read_record(world_file(self.run, world.name), WorldState)
            except OSError as error:
                errors.append(error)
                continue
            world.silent_seconds += elapsed
            world.next_look = now + self.look_seconds * (1.0 if world.state else _first_share(world.name))
            if state is None or _same(state, world.state):
                continue
            if world.state is None or not self.follows(world):
                logger.info("world %s: %d ranks, %d slots on %s", world.name, state.num_ranks, state.slots, state.host)
            world.state, world.silent_seconds = state, 0.0
            yield world
        if errors:
            raise errors[0]

    def gone(self) -> list[SeenWorld]:
        """Worlds that left in order, or have been silent for too long."""
        return [
            world for world in self.worlds.values()
            if world.silent_seconds > self.lease_seconds or (world.state is not None and world.state.left)
        ]  # fmt: skip

    def fence(self, world: SeenWorld) -> Path | None:
        """Moves the world's folder away: nothing can be claimed into it any more. Returns where it is now; None when it
        was gone."""
        folder = world_folder(self.run, world.name)
        away = files.discarded_name(folder)
        there = lease_files.move(folder, away)
        del self.worlds[world.name]
        return away if there else None

    def live(self) -> list[AttachedWorld]:
        """Worlds that follow this attempt."""
        return [
            AttachedWorld(
                name=world.name, slots=state.slots, num_ranks=state.num_ranks, version=state.version,
                num_held=len(state.held), seconds_silent=world.silent_seconds, host=state.host, job_id=state.job_id,
            )
            for world in self.worlds.values() if (state := world.state) is not None and self.follows(world)
        ]  # fmt: skip


def _same(new: WorldState, old: WorldState | None) -> bool:
    """Whether it is the same sign of life."""
    return old is not None and (new.incarnation, new.counter) == (old.incarnation, old.counter)


def _first_share(name: str) -> float:
    """Worlds that came together are looked at in different passes."""
    return (zlib.crc32(name.encode()) % 4 + 1) / 4
