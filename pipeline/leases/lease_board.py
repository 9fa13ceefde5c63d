"""The head's side of rollout arrays: offers groups to attached worlds, and collects what they tell.

The controller's thread gives orders, which cost no I/O; `poll`, on a thread of its own, does one pass over the files:

    orders ─► worlds' files ─► inboxes ─► offered/ ─► deaths ─► state.json ─► new offers ─► messages for the controller

A pass lists `leases/`, `offered/` and each live world's inbox, reads each world's file every few seconds, and writes
offers for at most `poll_seconds`. Its work follows what is out now, never what has been. State comes before offers: who
sees an offer can know of the weights that it asks for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from pekoe.pipeline import files
from pekoe.pipeline.leases import lease_files
from pekoe.pipeline.leases.lease_records import (
    HELD,
    AttachedWorld,
    BoardState,
    GroupKey,
    Lease,
    LeaseName,
    Notice,
    SharedWeights,
    Told,
    offered_folder,
    shards_of,
    state_file,
)
from pekoe.pipeline.leases.lease_table import LeaseTable, Place
from pekoe.pipeline.leases.notice_reader import NoticeReader
from pekoe.pipeline.leases.world_roster import SeenWorld, WorldRoster
from pekoe.pipeline.messages import Assign, Message, Published, Rejected
from pekoe.pipeline.run_directory import RunDirectory

logger = logging.getLogger(__name__)

STATE_SECONDS = 2.0
"""How often state.json is written when nothing changes."""
MAX_CANCELLED = 4096
"""Serials named in state.json at once; the others wait for their turn."""
SLOTS_PER_OFFER_AHEAD = 8
"""One group in so many is offered ahead, so that a slot that becomes free finds one."""
TROUBLE_LEASES = 20.0
"""For so many `lease_seconds` passes may meet errors of the disk (other than a full one) before `poll` raises."""


class LaterAttempt(RuntimeError):
    """Another attempt of the run has opened the board: this one must end."""


@dataclass
class _Orders:
    """What the controller wants; shared between two threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    queue: deque[Assign | GroupKey] = field(default_factory=deque)
    """Groups to offer, or to withdraw, in order."""
    num_offers: int = 0
    """In the queue."""
    num_open: int = 0
    """In the table."""
    worlds: tuple[AttachedWorld, ...] = ()
    num_slots: int = 0
    num_ranks: int = 0
    """Over the live worlds."""
    stranded: tuple[GroupKey, ...] = ()
    version: int = -1
    weights: SharedWeights | None = None
    starving: bool = False
    outcome: str = ""
    is_new: bool = True
    """Since state.json was written."""


class LeaseBoard:
    """One per attempt. `offer`, `withdraw`, `announce`, `starve`, `finish` and the counts may be called from any
    thread; `open` and `poll` from one."""

    def __init__(
        self, run: RunDirectory, attempt: int, config_hash: str, *, poll_seconds: float, lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.run, self.attempt, self.config_hash = run, attempt, config_hash
        self.poll_seconds, self.lease_seconds = poll_seconds, lease_seconds
        self.beat_seconds = max(poll_seconds, min(STATE_SECONDS, lease_seconds / 8))
        self.counts: Counter[str] = Counter()
        """offered, offered_again, revived, worlds_lost, worlds_left, notices, late, unknown: for metrics."""
        self.trouble = ""
        """What the disk said in the last pass; empty when all went well."""
        self._clock = clock
        self._orders = _Orders()
        self._table = LeaseTable(attempt, patience_seconds=2 * lease_seconds)
        self._roster = WorldRoster(run, attempt, lease_seconds=lease_seconds, look_seconds=self.beat_seconds)
        self._reader = NoticeReader(run, attempt, patience_seconds=lease_seconds)
        self._counter = 0
        self._state_due = 0.0
        self._others_due = 0.0
        self._told_cancelled: tuple[int, ...] = ()
        self._errors: list[OSError] = []
        self._trouble_since: float | None = None

    def open(self) -> None:
        """Withdraws all offers, leases and notices of earlier attempts at once, and begins anew.

        Whoever held one finds its folder gone. What they published stays: recovery adopts shards by the store and the
        ledger, so a notice that an earlier head left unread is not needed.
        """
        for folder in (self.run.leases, self.run.inbox):
            files.put_away(folder)
            for away in folder.parent.glob(f"{folder.name}.*{files.DISCARDED}"):
                files.put_away(away)
        files.make_folder(offered_folder(self.run))
        files.make_folder(self.run.inbox)

    def offer(self, assign: Assign) -> None:
        """A world shall sample this group; the same (group, try) may come again after it was published, rejected or
        withdrawn."""
        with self._orders.lock:
            self._orders.queue.append(assign)
            self._orders.num_offers += 1

    def withdraw(self, group: int, try_number: int) -> None:
        """The group is not wanted any more: its offer is taken back, or its holder is told to give up. Nothing happens
        to one that is not on the board."""
        with self._orders.lock:
            self._orders.queue.append((group, try_number))

    def announce(self, version: int, weights: SharedWeights) -> None:
        """Weights that worlds must load before they claim offers of this version."""
        with self._orders.lock:
            self._orders.version, self._orders.weights, self._orders.is_new = version, weights, True

    def starve(self, is_starving: bool) -> None:
        """Whether worlds shall publish what is done at once."""
        with self._orders.lock:
            self._orders.is_new |= self._orders.starving != is_starving
            self._orders.starving = is_starving

    def finish(self, outcome: str) -> None:
        """How the attempt ends: `finished` or `stopped`. The next pass says so to the worlds, and offers nothing."""
        with self._orders.lock:
            self._orders.outcome, self._orders.is_new = outcome, True

    def worlds(self) -> list[AttachedWorld]:
        """Live ones, as of the last pass."""
        return list(self._orders.worlds)

    def num_slots(self) -> int:
        return self._orders.num_slots

    def num_ranks(self) -> int:
        return self._orders.num_ranks

    def capacity(self) -> int:
        """How many more groups may be offered now: slots of live worlds, and a little ahead, less what is out."""
        with self._orders.lock:
            slots = self._orders.num_slots
            ahead = -(-slots // SLOTS_PER_OFFER_AHEAD)
            return slots + ahead - self._orders.num_open - self._orders.num_offers

    def num_open(self) -> int:
        """Groups on the board: to be offered, offered, or held."""
        with self._orders.lock:
            return self._orders.num_open + self._orders.num_offers

    def stranded(self) -> list[GroupKey]:
        """Groups on the board while no world is left, as of the last pass: who cannot wait for one may withdraw them
        and have them sampled elsewhere."""
        return list(self._orders.stranded)

    def poll(self) -> list[Message]:
        """One pass. Returns what worlds told: each notice once, those of one world in its order.

        What the disk refuses is done in a later pass. Raises LaterAttempt; and OSError when it refused something in
        every pass for long, for another reason than lack of room.
        """
        now = self._clock()
        messages: list[Message] = []
        self._errors = []
        self._take_orders()
        self._try(lambda: self._look_at_worlds(now))
        watched = self._roster.watched_seconds
        self._read_inboxes(watched, messages)
        self._try(lambda: self._see_offered(watched))
        self._bury(watched, messages)
        self._try(lambda: self._write_state(now))
        self._try(self._write_offers)
        self._publish_counts()
        self._judge(now)
        return messages

    def _publish_counts(self) -> None:
        """For the controller's thread."""
        worlds = tuple(self._roster.live())
        stranded = () if worlds else tuple(self._table.entries)
        with self._orders.lock:
            orders = self._orders
            orders.worlds, orders.stranded = worlds, stranded
            orders.num_slots = sum(world.slots for world in worlds)
            orders.num_ranks = sum(world.num_ranks for world in worlds)
            orders.num_open = len(self._table.entries)

    def _try(self, action: Callable[[], object]) -> None:
        """What the disk refuses now is for a later pass; the rest of this one goes on."""
        try:
            action()
        except OSError as error:
            self._errors.append(error)

    def _take_orders(self) -> None:
        with self._orders.lock:
            orders = list(self._orders.queue)
            self._orders.queue.clear()
            for order in orders:
                if isinstance(order, Assign):
                    self._table.add(order)
                else:
                    self._forget(order)
            self._orders.num_offers = 0
            self._orders.num_open = len(self._table.entries)

    def _forget(self, key: GroupKey) -> None:
        """Out of the books; a world known to hold it is told at once, any other when it names the serial."""
        entry = self._table.remove(key)
        if entry is not None and entry.place is Place.HELD and (world := self._roster.worlds.get(entry.world)):
            world.cancelled.add(entry.serial)

    def _look_at_worlds(self, now: float) -> None:
        for world in self._roster.look(now):
            assert world.state is not None
            if not self._roster.follows(world):
                continue
            serials = {serial for _, _, serial in world.state.held}
            world.ended &= serials
            held = [lease for lease in world.state.held if lease[2] not in world.ended]
            world.cancelled, revivable = self._table.see_held(world.name, held, self._roster.watched_seconds)
            for name, serial in revivable:
                if files.remove(offered_folder(self.run) / str(name)):
                    self._table.revive(world.name, name.key, serial)
                    world.cancelled.discard(serial)
                    self.counts["revived"] += 1

    def _read_inboxes(self, now: float, messages: list[Message]) -> None:
        for name in sorted(self._roster.worlds):
            self._try(lambda name=name: self._accept_all(self._reader.read(name, now), messages))  # type: ignore[misc]
        if now >= self._others_due:
            self._others_due = now + self.lease_seconds / 4
            others = self._reader.read_of_others(set(self._roster.worlds), now)
            self._try(lambda: self._accept_all(others, messages))

    def _see_offered(self, now: float) -> None:
        """Takes in what lies in offered/, and removes what should not."""
        for stray in self._table.see_offered(lease_files.leases_in(offered_folder(self.run)), now):
            files.remove(offered_folder(self.run) / str(stray))

    def _bury(self, now: float, messages: list[Message]) -> None:
        """Offers again what worlds that are gone held, and what nobody has named for too long."""
        for world in self._roster.gone():
            self._try(lambda world=world: self._bury_world(world, now, messages))  # type: ignore[misc]
        for entry in self._table.find_overdue(now):
            logger.warning("group %d try %d was lost by its holder: offered again", *entry.key)
            self.counts["offered_again"] += 1

    def _bury_world(self, world: SeenWorld, now: float, messages: list[Message]) -> None:
        """First nothing more can come into its folder, then its last notices are read: what is still open is lost."""
        away = self._roster.fence(world)
        names: list[LeaseName] = []
        self._try(lambda: self._accept_all(self._reader.read(world.name, now), messages))
        self._try(lambda: names.extend(lease_files.leases_in(away / HELD) if away else ()))
        left = world.state is not None and world.state.left
        self._tell_gone(world, left, self._table.lose(world.name, names, now, left=left))
        if away is not None:
            files.put_away(away)

    def _tell_gone(self, world: SeenWorld, left: bool, num_lost: int) -> None:
        self.counts["worlds_left" if left else "worlds_lost"] += 1
        self.counts["offered_again"] += num_lost
        how = "has left" if left else f"has said nothing for {world.silent_seconds:.0f} s"
        logger.log(
            logging.INFO if left else logging.WARNING,
            "world %s %s: %d groups that it held are offered again", world.name, how, num_lost,
        )  # fmt: skip

    def _write_state(self, now: float) -> None:
        cancelled = tuple(sorted(set().union(*(world.cancelled for world in self._roster.worlds.values()))))
        cancelled = cancelled[:MAX_CANCELLED]
        with self._orders.lock:
            orders = self._orders
            if not orders.is_new and cancelled == self._told_cancelled and now < self._state_due:
                return
            state = BoardState(
                attempt=self.attempt, counter=self._counter + 1, config_hash=self.config_hash, version=orders.version,
                weights=orders.weights, starving=orders.starving, outcome=orders.outcome, cancelled=cancelled,
                beat_seconds=self.beat_seconds, num_worlds=len(orders.worlds),
            )  # fmt: skip
            was_new, orders.is_new = orders.is_new, False
        try:
            there = lease_files.read_record(state_file(self.run), BoardState)
            if there is not None and there.attempt > self.attempt:
                raise LaterAttempt(
                    f"attempt {there.attempt} of {self.run.path} has begun: attempt {self.attempt} must end"
                )
            lease_files.write_visible(state_file(self.run), msgspec.json.encode(state))
        except OSError:
            with self._orders.lock:
                self._orders.is_new |= was_new
            raise
        self._counter += 1
        self._told_cancelled, self._state_due = cancelled, now + STATE_SECONDS

    def _write_offers(self) -> None:
        """Oldest first, for at most `poll_seconds`."""
        if self._orders.outcome or self._orders.is_new:
            return
        until = self._clock() + self.poll_seconds
        for entry in self._table.waiting():
            if self._clock() > until:
                return
            name = self._table.new_serial(entry)
            lease = Lease(entry.assign, self.attempt, name.serial, self.config_hash)
            lease_files.write_visible(offered_folder(self.run) / str(name), msgspec.msgpack.encode(lease))
            self._table.offered(entry)
            self.counts["offered"] += 1

    def _accept_all(self, notices: Iterator[Notice], messages: list[Message]) -> None:
        for notice in notices:
            self.counts["notices"] += 1
            serials = {(group, try_number): serial for group, try_number, serial in notice.leases}
            messages += [message for message in notice.messages if self._accept(message, serials)]
            if world := self._roster.worlds.get(notice.world):
                world.ended.update(serials.values())

    def _accept(self, message: Told, serials: dict[GroupKey, int]) -> bool:
        """Whether the controller shall hear of it; the groups that it ends leave the books.

        A shard counts whoever made it (the first one of a group wins); a rejection only from the holder.
        """
        if isinstance(message, Rejected):
            entry = self._table.entries.get((message.group, message.try_number))
            if entry is None or serials.get(entry.key) != entry.serial:
                self.counts["late"] += 1
                return False
            self._table.remove(entry.key)
        elif isinstance(message, Published):
            if not message.path.startswith(shards_of(self.attempt)):
                logger.warning("a world told of %s in attempt %d: passed over", message.path, self.attempt)
                self.counts["unknown"] += 1
                return False
            for group in message.groups:
                self._end(group.group, group.try_number, serials)
        return True

    def _end(self, group: int, try_number: int, serials: dict[GroupKey, int]) -> None:
        """A group is published: nobody else needs to go on with it."""
        entry = self._table.entries.get((group, try_number))
        if entry is None:
            self.counts["late"] += 1
        elif serials.get(entry.key) == entry.serial:
            self._table.remove(entry.key)
        else:
            self._forget(entry.key)

    def _judge(self, now: float) -> None:
        """Raises when the disk has refused something in every pass for long."""
        self.trouble = "; ".join(map(str, self._errors))
        if not self._errors:
            self._trouble_since = None
            return
        if self._trouble_since is None:
            self._trouble_since = now
            logger.warning("leases: %s; it is tried again", self.trouble)
        real = [error for error in self._errors if not files.is_full(error)]
        if real and now - self._trouble_since > TROUBLE_LEASES * self.lease_seconds:
            raise real[0]
