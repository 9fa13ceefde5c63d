"""The head's side: the end of an attempt, a disk that refuses, and what bounds a pass."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from board_room import LEASE_SECONDS, POLL_SECONDS, Room, attached, offers, state_of
from faulty_disk import UnsyncedDisk, installed

from pekoe.pipeline.leases.lease_board import LaterAttempt, LeaseBoard
from pekoe.pipeline.messages import Assign


def test_the_end_is_told_and_nothing_is_offered_after_it(room: Room) -> None:
    attached(room, "a")
    room.offer(0)
    room.board.finish("stopped")
    room.poll()
    assert state_of(room, "a").outcome == "stopped"
    assert offers(room) == []
    assert room.worlds["a"].claim(1) == []


def test_state_goes_out_at_once_when_something_changes(room: Room) -> None:
    attached(room, "a")
    for is_starving in (True, False):
        room.board.starve(is_starving)
        room.poll(0.1)
        state = state_of(room, "a")
        assert state.starving is is_starving
    room.board.starve(False)
    room.poll(0.1)
    assert state_of(room, "a").counter == state.counter, "nothing is new"
    room.poll(2.0)
    assert state_of(room, "a").counter == state.counter + 1


def test_an_earlier_attempt_that_lives_on_ends(room: Room) -> None:
    attached(room, "a")
    old = room.board
    room.begin(1)
    room.poll()
    room.now += 3.0
    with pytest.raises(LaterAttempt, match=r"attempt 1 of .* has begun: attempt 0 must end"):
        old.poll()


class _Broken(UnsyncedDisk):
    def __init__(self, code: int) -> None:
        self.code = code

    def create(self, path: Path) -> object:  # type: ignore[override]
        raise OSError(self.code, "no", str(path))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_is_told_of_and_only_a_broken_one_ends_the_run(room: Room, code: int) -> None:
    attached(room, "a")
    room.offer(0)
    with installed(_Broken(code)):
        for _ in range(3):
            room.poll(2.0)
        assert "no" in room.board.trouble
        assert offers(room) == []
        if code == errno.EIO:
            with pytest.raises(OSError, match="no"):
                room.poll(100 * LEASE_SECONDS)
        else:
            room.poll(100 * LEASE_SECONDS)
    room.poll()
    assert not room.board.trouble
    assert offers(room) == [(0, 0)]


def test_offering_one_group_twice_is_a_mistake(room: Room) -> None:
    room.offer(0)
    room.offer(0)
    with pytest.raises(AssertionError, match="group 0 try 0 was offered twice"):
        room.poll()


def test_a_pass_writes_offers_for_a_bounded_time(tmp_path: Path) -> None:
    room = Room(tmp_path)
    ticks = iter(range(10**6))
    board = LeaseBoard(
        room.run, 0, "hash", poll_seconds=POLL_SECONDS, lease_seconds=LEASE_SECONDS, clock=lambda: next(ticks) / 10
    )
    board.open()
    for group in range(100):
        board.offer(Assign(group, 0, group, 2, 0))
    board.poll()
    few = len(offers(room))
    assert 0 < few < 10
    assert offers(room) == [(group, 0) for group in range(few)], "the oldest first"
    assert board.num_open() == 100
