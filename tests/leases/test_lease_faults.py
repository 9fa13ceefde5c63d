"""One fault at each operation of the disk, on either side: an error, a lost answer, or the end of the process."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from board_room import Room
from faulty_disk import Crash, Fault, FaultyDisk, UnsyncedDisk, installed

FAULTS = {
    "crash": Fault(0, code=0),
    "EIO": Fault(0, code=errno.EIO),
    "ESTALE": Fault(0, code=errno.ESTALE),
    "ENOSPC": Fault(0, code=errno.ENOSPC),
    "EIO, done": Fault(0, code=errno.EIO, happened=True),
    "ENOENT, done": Fault(0, code=errno.ENOENT, happened=True),
}


def ready_room(path: Path) -> Room:
    """A head, a world, six groups offered."""
    room = Room(path)
    room.poll()
    room.attach("a").look()
    for group in range(6):
        room.offer(group)
    room.poll(2.0)
    return room


def work(room: Room) -> None:
    """A world's calls, each kind of them."""
    world = room.worlds["a"]
    world.look()
    world.claim(4)
    room.now += 5.0
    world.holder.beat(0)
    if len(world.running) > 1:
        room.publish("a", sorted(world.running)[:2])
    if world.running:
        room.reject("a", min(world.running))
    world.holder.leave()


def head(room: Room) -> None:
    """A head's passes: a notice, a withdrawal, a world that leaves, a new offer."""
    room.poll()
    room.offer(50)
    room.drop(min(room.wanted))
    room.poll(2.0)
    room.poll(2.0)


def head_beside_a_world(room: Room) -> None:
    world = room.worlds["a"]
    world.look()
    world.claim(3)
    room.publish("a", sorted(world.running)[:1])
    room.now += 5.0
    world.holder.beat(0)
    head(room)


def check(room: Room, has_gone: bool) -> None:
    """Whoever is left, and a new world, bring it to an end."""
    if has_gone:
        room.worlds.pop("a")
    assert not {key for key, count in room.places().items() if count > 1}
    room.attach("b")
    room.rest(20)
    assert not {key for key, count in room.places().items() if count > 1}
    room.finish(40)
    assert not room.wanted
    assert room.told <= set(room.delivered)
    assert set(room.delivered.values()) <= {1}


def count_operations(memory_path: Path, act: Callable[[Room], None]) -> int:
    with installed(UnsyncedDisk()):
        room = ready_room(memory_path / "count")
    disk = FaultyDisk(memory_path / "graveyard")
    with installed(disk):
        act(room)
    disk.close()
    return len(disk.operations)


@pytest.mark.parametrize("act", [work, head_beside_a_world])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_each_operation(memory_path: Path, act: Callable[[Room], None], name: str) -> None:
    num_operations = count_operations(memory_path, act)
    assert num_operations > 30
    for at in range(num_operations):
        with installed(UnsyncedDisk()):
            room = ready_room(memory_path / f"{at}")
        fault = FAULTS[name]
        disk = FaultyDisk(memory_path / f"graveyard-{at}", Fault(at, code=fault.code, happened=fault.happened))
        crashed = False
        with installed(disk):
            try:
                act(room)
            except Crash:
                crashed = True
        disk.close()
        with installed(UnsyncedDisk()):
            if crashed and act is head_beside_a_world:
                room.begin(1)
            check(room, has_gone=crashed or act is work)
