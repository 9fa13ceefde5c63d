"""A world's side: what it claims, what it names, what it does when the disk or the head lets it down."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest
from board_room import LEASE_SECONDS, Room, World
from faulty_disk import Fault, FaultyDisk, Lateness, UnsyncedDisk, installed

from pekoe.pipeline.leases import lease_files
from pekoe.pipeline.leases.lease_holder import (
    TROUBLE_SECONDS,
    LeaseHolder,
    OtherConfiguration,
    WorldSuperseded,
)
from pekoe.pipeline.leases.lease_records import (
    LeaseName,
    held_folder,
    inbox_folder,
    offered_folder,
    parse_notice_name,
    state_file,
    world_folder,
)
from pekoe.pipeline.messages import Finished, Rejected


def attached(room: Room, name: str = "a") -> World:
    room.poll()
    world = room.attach(name)
    world.look()
    room.poll(2.0)
    return world


def offered(room: Room, num_groups: int) -> None:
    for group in range(num_groups):
        room.offer(group)
    room.poll(2.0)


def test_the_name_of_an_offer_says_it_all() -> None:
    name = LeaseName(12, 3, 45, 6, 789)
    assert str(name) == "000012-3.v45.a6.789.msgpack"
    assert LeaseName.parse(str(name)) == name
    assert LeaseName.parse(f"{name}.17.part") is None
    assert LeaseName.parse("12-3.msgpack") is None
    assert parse_notice_name("0123abcd-0001.00000007.msgpack") == ("0123abcd-0001", 7)
    assert parse_notice_name("0123abcd-0001.00000007.msgpack.9.part") is None


@pytest.mark.parametrize("name", ["", "offered", "a/b", "..", "a.b", "-a", "x" * 101])
def test_names_that_no_world_can_have(room: Room, name: str) -> None:
    with pytest.raises(ValueError, match="at most 100 letters, digits"):
        room.attach(name)


def test_nothing_is_claimed_before_there_is_a_head(tmp_path: Path) -> None:
    room = Room(tmp_path)
    world = room.attach("a")
    assert world.holder.look() is None
    assert world.claim(3) == []
    world.holder.beat(0)
    world.holder.leave()
    assert not world_folder(room.run, "a").exists()
    with pytest.raises(ValueError, match="there is nobody to tell"):
        world.holder.tell([Rejected(0, 0, "error")])


def test_the_oldest_are_claimed_first(room: Room) -> None:
    world = attached(room)
    offered(room, 6)
    assert world.claim(2) == [(0, 0), (1, 0)]
    assert world.claim(9) == [(2, 0), (3, 0), (4, 0), (5, 0)]
    assert world.claim(9) == []


def test_a_listing_may_name_an_offer_twice(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """As filesystems do while others move files out of the folder: what is ours stays ours."""
    world = attached(room)
    offered(room, 3)
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: [*listdir(folder), *listdir(folder)])
    assert world.claim(5) == [(0, 0), (1, 0), (2, 0)]
    monkeypatch.setattr(lease_files, "names_in", lambda folder: [*listdir(folder), *listdir(folder)])
    room.offer(3)
    room.poll(2.0)
    assert world.claim(5) == [(3, 0)]
    assert not listdir(offered_folder(room.run))
    assert world.claim(5) == []
    assert len(listdir(held_folder(room.run, "a"))) == 4


def test_only_worlds_tell_of_what_worlds_do(room: Room) -> None:
    world = attached(room)
    with pytest.raises(TypeError, match="Finished"):
        world.holder.tell([Finished(0, 0)])


def test_a_world_that_samples_in_another_way_takes_nothing(room: Room) -> None:
    room.poll()
    holder = LeaseHolder(room.run, "b", num_ranks=1, slots=1, config_hash="another", clock=lambda: room.now)
    world = room.worlds["b"] = World(holder)
    world.look()
    offered(room, 1)
    with pytest.raises(OtherConfiguration, match="hash another, the run has hash"):
        world.claim(1)
    assert len(lease_files.leases_in(offered_folder(room.run))) == 1


def test_time_without_news_is_told_by_the_own_clock(room: Room) -> None:
    world = attached(room)
    state = world.holder.look()
    assert state is not None
    room.now += 500.0
    assert (later := world.holder.look()) == later
    assert later is not None
    assert later.seconds_unchanged == state.seconds_unchanged + 500.0
    room.poll()
    news = world.holder.look()
    assert news is not None
    assert news.seconds_unchanged == 0.0


def test_a_state_that_vanishes_or_is_older_changes_nothing(room: Room) -> None:
    world = attached(room)
    before = world.holder.look()
    content = state_file(room.run).read_bytes()
    state_file(room.run).unlink()
    assert world.holder.look() == before
    state_file(room.run).write_bytes(content[:10])
    assert world.holder.look() == before
    state_file(room.run).write_bytes(content.replace(b'"attempt":0', b'"attempt":-1'))
    assert world.holder.look() == before
    state_file(room.run).write_bytes(content)
    with installed(FaultyDisk(room.run.path / "grave", late=Lateness(errno.ESTALE, tries=2))):
        assert [world.holder.look() for _ in range(3)] == [before] * 3


def test_a_new_attempt_takes_all_leases(room: Room) -> None:
    world = attached(room)
    offered(room, 3)
    world.claim(2)
    room.begin(1)
    room.poll()
    room.poll()
    assert world.holder.claim(3, 0) == [], "it does not follow the new attempt yet"
    assert world.holder.look() is not None
    assert world.holder.follow(1) == [(0, 0), (1, 0)]
    world.running.clear()
    assert world.claim(3) == [(0, 0), (1, 0), (2, 0)]


def test_a_world_taken_for_dead_joins_again_and_its_notices_come(room: Room) -> None:
    world = attached(room)
    offered(room, 4)
    world.claim(2)
    room.publish("a", [(0, 0)])
    while room.board.num_slots():
        room.poll(5.0)
    assert world.claim(1) == [], "its folder is gone"
    world.holder.beat(0)
    assert (world_folder(room.run, "a") / "world.json").exists()
    room.poll(2.0)
    room.publish("a", [(1, 0)])
    room.poll()
    assert room.delivered == {"shards/0-a/1.h5": 1, "shards/0-a/2.h5": 1}
    assert room.wanted == {(2, 0), (3, 0)}


def test_a_second_process_of_the_same_name_takes_over(room: Room) -> None:
    """What the first one held goes back at once; if it still lives, it is told."""
    first = attached(room)
    offered(room, 2)
    first.claim(2)
    second = room.attach("a")
    second.look()
    assert len(lease_files.leases_in(offered_folder(room.run))) == 2
    room.poll()
    assert second.claim(2) == [(0, 0), (1, 0)]
    room.now += 5.0
    with pytest.raises(WorldSuperseded, match=r"world a of .* is attached by another process too"):
        first.holder.beat(0)
    room.publish("a", [(0, 0), (1, 0)])
    room.poll()
    assert not room.wanted


class _LyingRename(UnsyncedDisk):
    """Renames happen, and are reported as failed."""

    def __init__(self, code: int) -> None:
        self.code = code

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)
        raise OSError(self.code, "no answer", str(new))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT, errno.ESTALE, errno.EEXIST])
def test_an_ambiguous_rename_is_settled_by_looking_again(room: Room, code: int) -> None:
    world = attached(room)
    offered(room, 2)
    with installed(_LyingRename(code)):
        assert world.claim(1) == [(0, 0)]
        world.holder.beat(1)
        room.offer(2)
        room.poll(2.0)
    assert not room.board.trouble
    assert room.board.worlds()[0].num_held == 1
    assert len(lease_files.leases_in(offered_folder(room.run))) == 2


def test_a_lease_whose_move_seemed_to_fail_is_found_later(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    world = attached(room)
    offered(room, 1)
    with monkeypatch.context() as lying, installed(_LyingRename(errno.EIO)):
        lying.setattr(lease_files, "is_there", lambda path: path == held_folder(room.run, "a"))
        assert world.claim(1) == []
    assert world.claim(1) == [(0, 0)]
    room.publish("a", [(0, 0)])
    room.poll()
    assert not room.wanted


class _Refusing(UnsyncedDisk):
    """No file can be made."""

    def __init__(self, code: int) -> None:
        self.code = code

    def create(self, path: Path) -> BinaryIO:
        raise OSError(self.code, "no", str(path))


def test_only_a_disk_that_is_broken_for_long_ends_a_world(room: Room) -> None:
    world = attached(room)
    for code in (errno.ENOSPC, errno.EIO):
        with installed(_Refusing(code)):
            world.holder.beat(code)
            room.now += TROUBLE_SECONDS + 1.0
            if code == errno.ENOSPC:
                world.holder.beat(code)
            else:
                with pytest.raises(OSError, match="no"):
                    world.holder.beat(code)
        world.holder.beat(code)


def test_what_the_disk_refuses_is_told_later_and_once(room: Room) -> None:
    world = attached(room)
    offered(room, 2)
    world.claim(2)

    with installed(_Refusing(errno.ENOSPC)):
        room.publish("a", [(0, 0)])
        assert world.holder.num_untold == 1
        assert room.poll() == []
    assert world.holder.held.keys() == {(0, 0), (1, 0)}, "still held, for the head"
    room.now += 5.0
    world.holder.beat(0)
    assert world.holder.num_untold == 0
    room.publish("a", [(1, 0)])
    room.poll()
    assert room.delivered == {"shards/0-a/1.h5": 1, "shards/0-a/2.h5": 1}


def test_a_notice_written_twice_after_a_lost_answer_is_delivered_once(room: Room) -> None:
    """The head has taken and removed it when the world, told that it failed, writes it again."""
    world = attached(room)
    offered(room, 1)
    world.claim(1)

    class NoFolderSync(UnsyncedDisk):
        def sync_folder(self, folder: Path) -> None:
            raise OSError(errno.EIO, "no answer", str(folder))

    with installed(NoFolderSync()):
        room.publish("a", [(0, 0)])
    assert world.holder.num_untold == 1
    assert len(room.poll()) == 1
    world.holder.tell([])
    assert len(list(inbox_folder(room.run, "a").iterdir())) == 1
    assert room.poll() == []
    assert room.poll() == []
    assert not list(inbox_folder(room.run, "a").iterdir())


def test_the_notice_is_on_the_disk_before_the_lease_goes(room: Room) -> None:
    """A crash at any operation of `tell` leaves the lease or the notice."""
    for at in range(40):
        world = room.worlds["a"] = attached(room, "a") if at == 0 else room.worlds["a"]
        group = 100 + at
        room.offer(group)
        room.poll(2.0)
        assert world.claim(1) == [(group, 0)]
        disk = FaultyDisk(room.run.path / "grave", Fault(at=at, code=errno.EIO))
        with installed(disk):
            room.publish("a", [(group, 0)])
        held = [name.key for name in lease_files.leases_in(held_folder(room.run, "a"))]
        is_told = any(parse_notice_name(path.name) for path in inbox_folder(room.run, "a").iterdir())
        assert is_told or (group, 0) in held
        assert not is_told or world.holder.num_untold == 0 or (group, 0) in held
        disk.close()
        world.holder.tell([])
        room.poll()
        assert (group, 0) not in room.wanted
        if len(disk.operations) <= at:
            break
    else:
        pytest.fail("the fault was always met")
    assert at > 3


def test_leaving_puts_back_what_is_held(room: Room) -> None:
    world = attached(room)
    offered(room, 3)
    world.claim(2)
    world.holder.leave()
    world.holder.leave()
    assert sorted(name.key for name in lease_files.leases_in(offered_folder(room.run))) == [(0, 0), (1, 0), (2, 0)]
    assert world.holder.attempt is None


def test_a_world_says_no_more_than_it_must(room: Room) -> None:
    world = attached(room)
    path = world_folder(room.run, "a") / "world.json"
    world.holder.beat(0)
    before = path.read_bytes()
    world.holder.beat(0)
    room.now += 0.1
    world.holder.beat(0)
    assert path.read_bytes() == before
    world.holder.beat(1)
    assert path.read_bytes() != before, "new weights are told at once"
    before = path.read_bytes()
    room.now += LEASE_SECONDS / 8
    world.holder.beat(1)
    assert path.read_bytes() != before
