"""Any interleaving of offers, claims, notices, deaths, re-offers, withdrawals and new attempts; the same with a disk
that refuses things at random, before or after it has done them."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from board_room import LEASE_SECONDS, Room
from faulty_disk import installed
from flaky_disk import FlakyDisk
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

NAMES = ("w0", "w1", "w2")


class LeaseHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.disk = FlakyDisk()
        self.installed = installed(self.disk)
        self.installed.__enter__()
        self.room = Room(self.folder)
        self.next_group = 0
        for name in NAMES[:2]:
            self.room.attach(name)
        self.offer(4)

    def teardown(self) -> None:
        try:
            self.disk.share = 0.0
            self.room.rest()
            held = Counter(key for world in self.room.worlds.values() for key in world.running)
            assert not [key for key, count in held.items() if count > 1], "two live worlds hold one group"
            assert held.keys() <= self.room.wanted, "somebody works on what nobody wants"
            self.room.attach("last")
            self.room.finish()
            assert not self.room.wanted, "groups were lost"
            assert self.room.told <= set(self.room.delivered), "notices were lost"
        finally:
            self.installed.__exit__(None, None, None)
            shutil.rmtree(self.folder)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Foremen and heads meet an OSError as the real ones do: the next pass does what this one could not."""
        try:
            yield
        except OSError:
            assert self.disk.share, "the disk was well"

    @rule(count=st.integers(1, 6))
    def offer(self, count: int) -> None:
        for _ in range(count):
            self.room.offer(self.next_group)
            self.next_group += 1

    @rule(seconds=st.sampled_from([0.5, 0.5, 0.5, 2.0, 8.0, LEASE_SECONDS]), times=st.integers(1, 3))
    def poll(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.room.poll(seconds)

    @rule(seconds=st.sampled_from([0.5, 2.0, 8.0]), times=st.integers(1, 8), data=st.data(), limit=st.integers(0, 3))
    def work_but_some(self, seconds: float, times: int, data: st.DataObject, limit: int) -> None:
        """Passes of everybody but a few who are stuck: long enough, and they are taken for dead."""
        stuck = data.draw(st.sets(st.sampled_from(NAMES), max_size=2))
        for _ in range(times):
            self.room.poll(seconds)
            for name in sorted(set(self.room.worlds) - stuck):
                self._pass(name, limit)

    def _pass(self, name: str, limit: int) -> None:
        world = self.room.worlds[name]
        with self.going_on():
            world.look()
            world.holder.beat(0)
            world.claim(limit)

    @precondition(lambda self: len(self.room.worlds) < len(NAMES))
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        """New; or one that was killed and is started again under the same name."""
        self.room.attach(data.draw(st.sampled_from([name for name in NAMES if name not in self.room.worlds])))

    def _world(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.room.worlds)))

    @precondition(lambda self: self.room.worlds)
    @rule(data=st.data(), follow=st.booleans())
    def look(self, data: st.DataObject, follow: bool) -> None:
        with self.going_on():
            self.room.worlds[self._world(data)].look(follow=follow)

    @precondition(lambda self: self.room.worlds)
    @rule(data=st.data(), limit=st.integers(1, 5))
    def work(self, data: st.DataObject, limit: int) -> None:
        self._pass(self._world(data), limit)

    @precondition(lambda self: self.room.worlds)
    @rule(data=st.data(), limit=st.integers(1, 5))
    def claim_without_a_look(self, data: st.DataObject, limit: int) -> None:
        with self.going_on():
            self.room.worlds[self._world(data)].claim(limit)

    @precondition(lambda self: self.room.worlds)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        with self.going_on():
            self.room.worlds[self._world(data)].holder.beat(0)

    @precondition(lambda self: any(world.running for world in self.room.worlds.values()))
    @rule(data=st.data(), rejected=st.booleans())
    def tell(self, data: st.DataObject, rejected: bool) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, world in self.room.worlds.items() if world.running)))
        running = sorted(self.room.worlds[name].running)
        with self.going_on():
            if rejected:
                self.room.reject(name, data.draw(st.sampled_from(running)))
            else:
                self.room.publish(name, data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True)))

    @precondition(lambda self: self.room.worlds)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        del self.room.worlds[self._world(data)]

    @precondition(lambda self: self.room.worlds)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        with self.going_on():
            self.room.worlds.pop(self._world(data)).holder.leave()

    @precondition(lambda self: self.room.wanted)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """Dropped: the prompt comes again as another try."""
        self.room.drop(data.draw(st.sampled_from(sorted(self.room.wanted))))

    @precondition(lambda self: self.room.attempt < 2)
    @rule()
    def new_attempt(self) -> None:
        share, self.disk.share = self.disk.share, 0.0
        self.room.begin(self.room.attempt + 1)
        self.disk.share = share

    @invariant()
    def a_lease_lies_in_one_place(self) -> None:
        several = {key for key, count in self.room.places().items() if count > 1}
        assert not several, f"{several} can be claimed, or are held, twice"

    @invariant()
    def each_notice_comes_once(self) -> None:
        assert all(count == 1 for count in self.room.delivered.values())

    @invariant()
    def the_board_holds_what_is_wanted(self) -> None:
        assert self.room.board.num_open() >= len(self.room.wanted)


class FlakyHistory(LeaseHistory):
    @rule(share=st.sampled_from([0.0, 0.02, 0.1, 0.4]), seed=st.integers(0, 1000))
    def refuse(self, share: float, seed: int) -> None:
        self.disk.share, self.disk.random = share, random.Random(seed)


TestLeaseHistory = LeaseHistory.TestCase
TestFlakyHistory = FlakyHistory.TestCase
TestLeaseHistory.settings = TestFlakyHistory.settings = settings(
    max_examples=int(os.environ.get("PEKOE_HISTORIES", "30")), stateful_step_count=50, deadline=None,
    suppress_health_check=list(HealthCheck), print_blob=True,
    phases=[phase for phase in Phase if phase is not Phase.shrink or "PEKOE_SHRINK" in os.environ],
)  # fmt: skip
