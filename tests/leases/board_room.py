"""A board, worlds attached to it and a controller's books, all on one clock that the test moves by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pekoe.pipeline.leases import lease_files
from pekoe.pipeline.leases.lease_board import LeaseBoard
from pekoe.pipeline.leases.lease_holder import LeaseHolder
from pekoe.pipeline.leases.lease_records import BoardState, SharedWeights, held_folder, is_world_name, offered_folder
from pekoe.pipeline.messages import Assign, Message, Published, PublishedGroup, Rejected
from pekoe.pipeline.run_directory import RunDirectory

POLL_SECONDS = 0.5
LEASE_SECONDS = 30.0

Key = tuple[int, int]


@dataclass
class World:
    """A foreman that obeys the rules: looks before it claims, tells only what it holds."""

    holder: LeaseHolder
    running: set[Key] = field(default_factory=set)

    def look(self, *, follow: bool = True) -> None:
        state = self.holder.look()
        if state is None:
            return
        if follow and state.attempt != self.holder.attempt:
            assert set(self.holder.follow(state.attempt)) == self.running
            self.running.clear()
        for key in self.holder.cancelled():
            self.running.remove(key)

    def claim(self, limit: int, version: int = 0) -> list[Key]:
        keys = [(a.group, a.try_number) for a in self.holder.claim(limit, version)]
        assert len(keys) <= max(limit, 0)
        assert not self.running & set(keys)
        self.running.update(keys)
        return keys


class Room:
    """One run. `wanted` are the groups that the controller waits for; `delivered` counts what came to it."""

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory(path / "run")
        self.now = 1000.0
        self.attempt = 0
        self.wanted: set[Key] = set()
        self.delivered: Counter[str] = Counter()
        self.told: set[str] = set()
        """Shards told of in this attempt: each must come, once."""
        self.worlds: dict[str, World] = {}
        self.num_told = 0
        self.board = self.begin(0)

    def begin(self, attempt: int) -> LeaseBoard:
        """A head begins; what is still wanted is offered again by its controller."""
        self.attempt = attempt
        self.board = LeaseBoard(
            self.run, attempt, "hash", poll_seconds=POLL_SECONDS, lease_seconds=LEASE_SECONDS, clock=lambda: self.now
        )
        self.board.open()
        self.board.announce(0, SharedWeights(0, "weights/shared/v-0", "token"))
        self.told.clear()
        self.delivered.clear()
        for group, try_number in sorted(self.wanted):
            self.board.offer(Assign(group, try_number, group, 2, 0))
        return self.board

    def offer(self, group: int, try_number: int = 0, min_version: int = 0) -> None:
        self.wanted.add((group, try_number))
        self.board.offer(Assign(group, try_number, group, 2, min_version))

    def drop(self, key: Key) -> None:
        """The controller gives this try up and issues the prompt again."""
        self.wanted.remove(key)
        self.board.withdraw(*key)
        self.offer(key[0], key[1] + 1)

    def attach(self, name: str, slots: int = 8) -> World:
        holder = LeaseHolder(self.run, name, num_ranks=1, slots=slots, config_hash="hash", clock=lambda: self.now)
        self.worlds[name] = World(holder)
        return self.worlds[name]

    def poll(self, seconds: float = POLL_SECONDS) -> list[Message]:
        self.now += seconds
        messages = self.board.poll()
        for message in messages:
            self._hear(message)
        return messages

    def _hear(self, message: Message) -> None:
        if isinstance(message, Published):
            self.delivered[message.path] += 1
            self.wanted -= {(group.group, group.try_number) for group in message.groups}
        elif isinstance(message, Rejected):
            self.delivered[message.detail] += 1
            if (key := (message.group, message.try_number)) in self.wanted:
                self.wanted.remove(key)
                self.offer(message.group, message.try_number + 1)

    def publish(self, name: str, keys: list[Key]) -> None:
        self.num_told += 1
        path = f"shards/{self.worlds[name].holder.attempt}-{name}/{self.num_told}.h5"
        groups = tuple(PublishedGroup(group, try_number, ()) for group, try_number in keys)
        self._tell(name, keys, Published(path, groups), path)

    def reject(self, name: str, key: Key) -> None:
        self.num_told += 1
        self._tell(name, [key], Rejected(*key, "error", f"reject-{self.num_told}"), "")

    def _tell(self, name: str, keys: list[Key], message: Message, path: str) -> None:
        world = self.worlds[name]
        world.running -= set(keys)
        world.holder.tell([message])
        if path and world.holder.attempt == self.attempt and not world.holder.num_untold:
            self.told.add(path)

    def places(self) -> Counter[Key]:
        """In how many folders (offered/ and those of worlds that are not judged dead) a file of each group lies."""
        folders = [offered_folder(self.run)]
        folders += [held_folder(self.run, n) for n in lease_files.names_in(self.run.leases) if is_world_name(n)]
        return Counter(name.key for folder in folders for name in lease_files.leases_in(folder))

    def rest(self, rounds: int = 30) -> None:
        """Nobody claims or tells, until everybody has heard of everything."""
        for _ in range(rounds):
            self.poll(5.0)
            for world in self.worlds.values():
                world.look()
                world.holder.beat(0)

    def finish(self, rounds: int = 60) -> None:
        """Live worlds go on until nothing is wanted any more."""
        for _ in range(rounds):
            self.poll(5.0)
            for name, world in self.worlds.items():
                world.look()
                world.holder.beat(0)
                world.claim(world.holder.slots - len(world.running))
                if world.running:
                    self.publish(name, sorted(world.running))
            if not self.wanted:
                break
        self.poll()


def attached(room: Room, *names: str, slots: int = 8) -> None:
    """Worlds that the board knows."""
    room.poll()
    for name in names:
        room.attach(name, slots).look()
    room.poll(2.0)


def one_pass(room: Room, *names: str, limit: int = 8, seconds: float = 2.0) -> None:
    """Of the head, and then of these worlds."""
    room.poll(seconds)
    for name in names:
        room.worlds[name].look()
        room.worlds[name].holder.beat(0)
        room.worlds[name].claim(limit)


def silence(room: Room, *awake: str) -> None:
    """The others say nothing until they are taken for dead; these live on, and claim nothing."""
    for _ in range(int(LEASE_SECONDS / 2) + 2):
        one_pass(room, *awake, limit=0)


def state_of(room: Room, name: str) -> BoardState:
    """As a world sees it."""
    state = room.worlds[name].holder.look()
    assert state is not None
    return state


def offers(room: Room) -> list[tuple[int, int]]:
    return sorted(name.key for name in lease_files.leases_in(offered_folder(room.run)))
