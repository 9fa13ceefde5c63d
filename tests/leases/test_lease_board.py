"""The head's side: what is offered, who is taken for dead, what a notice does."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from board_room import LEASE_SECONDS, Room, attached, offers, one_pass, silence, state_of
from faulty_disk import UnsyncedDisk, installed

from pekoe.pipeline import files
from pekoe.pipeline.leases import lease_files, lease_holder
from pekoe.pipeline.leases.lease_records import (
    LeaseName,
    SharedWeights,
    held_folder,
    inbox_folder,
    offered_folder,
    world_folder,
)
from pekoe.pipeline.messages import DiskRefused, Published, PublishedGroup


def test_capacity_follows_slots_and_what_is_out(room: Room) -> None:
    assert room.board.capacity() == 0
    attached(room, "a", "b", slots=8)
    assert (room.board.num_slots(), room.board.num_ranks(), room.board.capacity()) == (16, 2, 18)
    for group in range(5):
        room.offer(group)
    assert room.board.capacity() == 13, "orders count at once"
    one_pass(room, "a", limit=3)
    assert room.board.capacity() == 13, "offered or held is the same"
    room.publish("a", sorted(room.worlds["a"].running))
    room.poll()
    assert room.board.capacity() == 16


def test_groups_are_stranded_when_the_last_world_is_gone(room: Room) -> None:
    attached(room, "a")
    room.offer(0)
    room.offer(1)
    one_pass(room, "a", limit=1)
    assert room.board.stranded() == []
    silence(room)
    assert sorted(room.board.stranded()) == [(0, 0), (1, 0)]
    for key in room.board.stranded():
        room.drop(key)
    room.poll()
    assert room.board.capacity() < 0
    assert room.board.num_slots() == 0
    assert sorted(room.board.stranded()) == [(0, 1), (1, 1)]


def test_a_world_that_another_attempt_has_is_no_slot(room: Room) -> None:
    attached(room, "a")
    room.begin(1)
    room.poll()
    assert room.board.num_slots() == 0
    room.worlds["a"].look(follow=False)
    room.worlds["a"].holder.beat(0)
    room.poll(2.0)
    assert room.board.num_slots() == 0, "it still follows attempt 0"
    room.worlds["a"].look()
    room.poll(2.0)
    assert room.board.num_slots() == 8


def test_an_offer_waits_for_weights_that_are_told(room: Room) -> None:
    """State first: who sees an offer can know of the weights that it asks for."""
    attached(room, "a")
    room.board.announce(3, SharedWeights(3, "weights/shared/v-3", "t"))
    room.offer(0, min_version=3)
    room.poll()
    world = room.worlds["a"]
    assert state_of(room, "a").weights == SharedWeights(3, "weights/shared/v-3", "t")
    assert world.claim(8, version=2) == []
    assert world.claim(8, version=3) == [(0, 0)]


def test_what_a_dead_world_held_is_offered_again(room: Room) -> None:
    attached(room, "a", "b")
    for group in range(4):
        room.offer(group)
    one_pass(room, "a", limit=2)
    one_pass(room, "a", limit=1)
    assert len(offers(room)) == 1
    silence(room, "b")
    assert offers(room) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert not world_folder(room.run, "a").exists()
    assert not list(room.run.leases.glob(f"*{files.DISCARDED}"))
    assert [world.name for world in room.board.worlds()] == ["b"]
    assert (room.board.counts["worlds_lost"], room.board.counts["offered_again"]) == (1, 3)


def test_a_claim_in_the_last_instant_is_found_in_the_dead_worlds_folder(room: Room) -> None:
    """Its beat never named it; nobody waits for the long patience with missing leases."""
    attached(room, "a", "b")
    silence(room, "a", "b")
    room.offer(0)
    one_pass(room, "a", limit=1)
    room.worlds.pop("a")
    silence(room, "b")
    assert offers(room) == [(0, 0)]


def test_a_suspended_head_takes_nobody_for_dead(room: Room) -> None:
    """Nor when its whole node was, and the world there with it."""
    attached(room, "a")
    room.offer(0)
    one_pass(room, "a")
    room.poll(2.0)
    for _ in range(3):
        room.poll(10 * LEASE_SECONDS)
    assert room.board.num_slots() == 8
    assert offers(room) == []
    room.worlds["a"].holder.beat(0)
    for _ in range(4):
        room.poll(10 * LEASE_SECONDS)
    assert room.board.num_slots() == 8
    room.poll(10 * LEASE_SECONDS)
    room.poll(10 * LEASE_SECONDS)
    assert room.board.num_slots() == 0, "the same counter at six looks"


def test_offers_of_another_head_are_nobodys(room: Room) -> None:
    """An earlier attempt that lives on for a moment wrote it."""
    attached(room, "a")
    name = LeaseName(5, 0, 0, 9, 1)
    lease_files.write_visible(offered_folder(room.run) / str(name), b"of attempt 9")
    room.worlds["a"].look()
    assert room.worlds["a"].claim(1) == []
    assert offers(room) == [(5, 0)], "not even touched"
    room.poll()
    assert offers(room) == []


def test_the_last_notice_of_a_dead_world_counts(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """It told, and died before the head looked: what it told of is not sampled again."""
    attached(room, "a", "b")
    room.offer(0)
    room.offer(1)
    one_pass(room, "a")
    room.publish("a", [(0, 0)])
    monkeypatch.setattr(room.board, "_read_inboxes", lambda now, messages: None)
    silence(room, "b")
    assert room.wanted == {(1, 0)}
    assert offers(room) == [(1, 0)]


def test_a_world_taken_for_dead_goes_on_with_what_nobody_took(room: Room) -> None:
    attached(room, "a", "b")
    room.offer(0)
    room.offer(1)
    one_pass(room, "a")
    silence(room, "b")
    (taken,) = room.worlds["b"].claim(1)
    for _ in range(3):
        one_pass(room, "a", "b", limit=0)
    assert room.worlds["a"].running == {(0, 0), (1, 0)} - {taken}
    assert room.worlds["b"].running == {taken}
    assert offers(room) == [], "the newer offer was taken back"
    assert room.board.counts["revived"] == 1
    room.publish("a", sorted(room.worlds["a"].running))
    room.publish("b", [taken])
    room.poll()
    assert not room.wanted


def test_a_dead_world_may_publish_first(room: Room) -> None:
    """Then the one that sampled the group again gives it up."""
    attached(room, "a", "b")
    room.offer(0)
    one_pass(room, "a")
    silence(room, "b")
    assert room.worlds["b"].claim(1) == [(0, 0)]
    one_pass(room, "b")
    one_pass(room, "b")
    room.publish("a", [(0, 0)])
    room.poll(LEASE_SECONDS / 4)
    assert not room.wanted
    one_pass(room, "b")
    assert not room.worlds["b"].running


def test_a_rejection_counts_only_from_the_holder(room: Room) -> None:
    attached(room, "a", "b")
    room.offer(0)
    one_pass(room, "a")
    silence(room, "b")
    assert room.worlds["b"].claim(1) == [(0, 0)]
    one_pass(room, "b")
    one_pass(room, "b")
    room.reject("a", (0, 0))
    room.poll(LEASE_SECONDS / 4)
    assert room.wanted == {(0, 0)}, "the other one may still make it"
    room.reject("b", (0, 0))
    room.poll()
    assert room.wanted == {(0, 1)}


def test_withdrawn_offers_go_and_holders_are_told(room: Room) -> None:
    attached(room, "a", "b")
    for group in range(3):
        room.offer(group)
    one_pass(room, "a", limit=1)
    one_pass(room, "a", limit=0)
    room.poll(2.0)
    (held,) = room.worlds["a"].running
    for key in [(0, 0), (1, 0), (2, 0)]:
        room.drop(key)
    room.board.withdraw(77, 0)
    room.poll()
    room.poll()
    assert offers(room) == [(0, 1), (1, 1), (2, 1)]
    assert held not in offers(room)
    room.worlds["a"].look()
    assert not room.worlds["a"].running
    assert lease_files.leases_in(held_folder(room.run, "a")) == []
    one_pass(room, "a", limit=0)
    room.poll(2.0)
    assert state_of(room, "a").cancelled == (), "it stops naming the lease, so does the head"


def test_the_same_try_may_come_again_at_once(room: Room) -> None:
    """Its shard was damaged. A sign of life from before the notice, read after it, revives nothing."""
    attached(room, "a")
    room.offer(0)
    one_pass(room, "a")
    room.poll(2.0)
    room.now += 0.1
    room.worlds["a"].holder.beat(1)
    room.publish("a", [(0, 0)])
    room.poll(0.1)
    assert not room.wanted
    room.offer(0)
    room.poll(2.0)
    room.poll()
    assert offers(room) == [(0, 0)]
    assert room.worlds["a"].claim(1) == [(0, 0)]


def test_a_group_that_its_holder_lost_is_offered_again(room: Room) -> None:
    attached(room, "a", "b")
    room.offer(0)
    room.poll()
    (path,) = offered_folder(room.run).iterdir()
    path.write_bytes(b"cut")
    room.worlds["a"].look()
    assert room.worlds["a"].claim(1) == []
    for _ in range(int(2 * LEASE_SECONDS / 2) + 3):
        one_pass(room, "a", "b", limit=0)
    assert offers(room) == [(0, 0)]
    assert room.worlds["b"].claim(1) == [(0, 0)]


def test_notices_come_in_order_over_many_passes(room: Room) -> None:
    attached(room, "a")
    for group in range(200):
        room.offer(group)
    one_pass(room, "a", limit=200)
    told = []
    for group in range(200):
        room.publish("a", [(group, 0)])
        told.append(f"shards/0-a/{group + 1}.h5")
    heard = [message.path for _ in range(5) for message in room.poll() if isinstance(message, Published)]
    assert heard == told
    assert not list(inbox_folder(room.run, "a").iterdir())


def test_a_notice_that_comes_late_is_waited_for(room: Room) -> None:
    """The listing shows the second one only: the first comes before it, or is given up after a while."""
    attached(room, "a")
    for group in range(3):
        room.offer(group)
    one_pass(room, "a")
    for group in range(3):
        room.publish("a", [(group, 0)])
    first, _, third = sorted(inbox_folder(room.run, "a").iterdir())
    hidden = {path: path.read_bytes() for path in (first, third)}
    first.unlink()
    assert room.poll() == []
    first.write_bytes(hidden[first])
    third.unlink()
    assert len(room.poll()) == 2
    third.write_bytes(b"not a notice")
    fourth = third.with_name(third.name.replace("00000002", "00000003"))
    fourth.write_bytes(hidden[third])
    silence(room, "a")
    assert room.delivered["shards/0-a/3.h5"] == 1
    assert room.board._reader.num_lost == 1
    assert not list(inbox_folder(room.run, "a").iterdir())


class _NoRemovals(UnsyncedDisk):
    def remove(self, path: Path) -> None:
        if path.parent.parent.name == "inbox":
            raise OSError(errno.EIO, "no", str(path))
        super().remove(path)


def test_a_notice_that_cannot_be_removed_is_not_delivered_twice(room: Room) -> None:
    attached(room, "a")
    room.offer(0)
    one_pass(room, "a")
    room.publish("a", [(0, 0)])
    with installed(_NoRemovals()):
        assert len(room.poll()) == 1
        assert room.poll() == []
    assert len(list(inbox_folder(room.run, "a").iterdir())) == 1
    assert room.poll() == []
    assert not list(inbox_folder(room.run, "a").iterdir())


def test_notices_of_another_attempt_are_thrown_away(room: Room) -> None:
    attached(room, "a")
    room.offer(0)
    one_pass(room, "a")
    room.publish("a", [(0, 0)])
    room.offer(1)
    one_pass(room, "a")
    room.wanted = {(0, 0), (1, 0)}
    room.begin(1)
    assert room.poll() == [], "what an earlier head left unread"
    room.publish("a", [(1, 0)])
    for _ in range(3):
        assert room.poll(LEASE_SECONDS / 4) == [], "what is told to an earlier attempt"
    room.finish(rounds=3)
    assert not room.wanted


def test_a_shard_of_another_attempt_does_not_count(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The world does not tell of it, and the head would not listen."""
    attached(room, "a")
    room.offer(0)
    one_pass(room, "a")
    strange = Published("shards/7-a/x.h5", (PublishedGroup(0, 0, ()),))
    room.worlds["a"].holder.tell([strange])
    assert not list(inbox_folder(room.run, "a").iterdir())
    monkeypatch.setattr(lease_holder, "shards_of", lambda attempt: "")
    room.worlds["a"].holder.tell([strange])
    assert room.poll() == []
    assert room.board.counts["unknown"] == 1


def test_a_full_disk_of_a_world_is_passed_on(room: Room) -> None:
    attached(room, "a")
    room.worlds["a"].holder.tell([DiskRefused("no room", 3)])
    assert room.poll() == [DiskRefused("no room", 3)]


def test_inboxes_of_the_dead_go_when_nothing_more_comes(room: Room) -> None:
    attached(room, "a", "b")
    room.worlds.pop("a")
    for _ in range(6):
        silence(room, "b")
    assert [path.name for path in room.run.inbox.iterdir()] == ["b"]


def test_a_world_that_leaves_is_no_loss(room: Room) -> None:
    attached(room, "a", "b")
    room.offer(0)
    one_pass(room, "a")
    one_pass(room, "a")
    room.worlds.pop("a").holder.leave()
    assert offers(room) == [(0, 0)]
    room.poll(2.0)
    assert [world.name for world in room.board.worlds()] == ["b"]
    assert offers(room) == [(0, 0)]
    assert (room.board.counts["offered"], room.board.counts["worlds_left"]) == (1, 1)


def test_what_a_leaving_world_put_back_is_not_offered_twice(room: Room) -> None:
    """Another one has taken it before the head looked."""
    attached(room, "a", "b")
    room.offer(0)
    one_pass(room, "a")
    one_pass(room, "a")
    room.poll(2.0)
    room.worlds.pop("a").holder.leave()
    room.worlds["b"].look()
    assert room.worlds["b"].claim(1) == [(0, 0)]
    for _ in range(3):
        one_pass(room, "b", limit=0)
        assert offers(room) == []
    assert room.worlds["b"].running == {(0, 0)}
