"""The foreman's side of rollout arrays: claims offers for its world, and tells the head what became of them.

    look ─► (a new attempt: follow) ─► cancelled ─► claim ─► ranks sample, publish ─► tell        beat, every pass
                                                                                      leave, once, at the end

The world is alive for the head while its counter goes up. If the head has taken it for dead, its folder is gone: the
next `beat` makes it anew under the same name and names what the world still works on. The head then lets it go on with
each group that nobody else has taken meanwhile, and cancels the others.
"""

from __future__ import annotations

import logging
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from pekoe.pipeline import files
from pekoe.pipeline.leases import lease_files
from pekoe.pipeline.leases.lease_records import (
    BoardState,
    GroupKey,
    Lease,
    LeaseName,
    Notice,
    Told,
    WorldState,
    check_world_name,
    held_folder,
    offered_folder,
    shards_of,
    state_file,
    world_file,
)
from pekoe.pipeline.leases.notice_outbox import NoticeOutbox
from pekoe.pipeline.messages import Assign, DiskRefused, Message, Published, Rejected
from pekoe.pipeline.run_directory import RunDirectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RIVALS = 16
"""With other worlds about, each tries the oldest offers in an order of its own, among at most so many times what it
wants: fewer lost races."""


class WorldSuperseded(RuntimeError):
    """Another process attaches under this world's name: this one must end."""


class OtherConfiguration(ValueError):
    """An offer is of a run that samples in another way than this world."""


TROUBLE_SECONDS = 600.0
"""For so long one kind of access may fail, for another reason than lack of room, before it is raised."""


class LeaseHolder:
    """One thread of one process per world; `world` is a name that no other living process uses.

    What the disk refuses is done by a later call: OSError comes only when it has refused the same for long.
    """

    def __init__(
        self, run: RunDirectory, world: str, *, num_ranks: int, slots: int, config_hash: str = "", host: str = "",
        job_id: str = "", clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`config_hash`: of this world's own configuration; empty: offers are not compared with it."""
        self.run, self.world = run, check_world_name(world)
        self.num_ranks, self.slots, self.config_hash = num_ranks, slots, config_hash
        self.host, self.job_id = host or socket.gethostname(), job_id
        self.attempt: int | None = None
        """That is followed; None before the first `follow`."""
        self.held: dict[GroupKey, Lease] = {}
        """Claimed; not given up, and no notice of its end is on the disk."""
        self._clock = clock
        self._incarnation = uuid.uuid4().hex[:8]
        self._random = random.Random(world)
        self._state: BoardState | None = None
        self._state_since = 0.0
        self._num_joins = 0
        self._counter = 0
        self._must_join = True
        self._beat_due = 0.0
        self._version = -1
        self._outbox = NoticeOutbox(run, world)
        self._trouble_since: dict[str, float] = {}
        self._ended: dict[int, LeaseName] = {}
        """By serial: leases that ended, whose file may still lie in `held/`."""

    def look(self) -> BoardState | None:
        """What the head said last, with the time since it was new by this process's clock; None while there is nothing.

        A file that cannot be seen for a moment, and words of an older attempt, change nothing.
        """
        now = self._clock()
        found = self._try("look", lambda: lease_files.read_record(state_file(self.run), BoardState), None)
        known = self._state
        if found is not None and (known is None or (found.attempt, found.counter) > (known.attempt, known.counter)):
            self._state, self._state_since = found, now
        if self._state is None:
            return None
        return msgspec.structs.replace(self._state, seconds_unchanged=now - self._state_since)

    def follow(self, attempt: int) -> list[GroupKey]:
        """From now on works for this attempt; returns the groups of the one before, which are given up.

        What was not told yet of the older attempt never will be: recovery finds its shards by itself.
        """
        given_up = sorted(self.held.keys() - self._outbox.groups())
        self.held.clear()
        self._outbox.clear()
        self._ended.clear()
        self.attempt, self._must_join, self._beat_due = attempt, True, 0.0
        self._try("join", self._join, None)
        return given_up

    def claim(self, limit: int, version: int) -> list[Assign]:
        """At most `limit` offers of the followed attempt that may be sampled with weights of `version`, the oldest
        first. Somebody else may be faster; that is no error."""
        state = self._state
        if self._must_join or limit <= 0 or state is None or state.attempt != self.attempt or state.outcome:
            return []
        claimed: list[Assign] = []
        self._try("claim", lambda: self._claim_into(claimed, limit, version), None)
        return sorted(claimed, key=lambda assign: assign.group)

    def cancelled(self) -> list[GroupKey]:
        """Groups that are not wanted any more, as of the last `look`; they are not held from now on."""
        if self._state is None or self._state.attempt != self.attempt:
            return []
        serials = set(self._state.cancelled)
        leases = [lease for lease in self.held.values() if lease.serial in serials]
        for lease in leases:
            self._end(lease)
        return sorted({_key(lease) for lease in leases} - self._outbox.groups())

    def tell(self, messages: Sequence[Message]) -> None:
        """One durable file with these messages; the leases that they end are given up after it.

        What the disk refuses is kept in memory and written by the next `tell` or `beat`. A shard of an attempt that is
        not followed any more is passed over: the head of the new one has found it, or set it aside.
        """
        if self.attempt is None:
            raise ValueError(f"world {self.world} follows no attempt: there is nobody to tell")
        told: list[Told] = []
        for message in messages:
            if not isinstance(message, Published | Rejected | DiskRefused):
                raise TypeError(f"{type(message).__name__}: worlds tell of Published, Rejected and DiskRefused only")
            if isinstance(message, Published) and not message.path.startswith(shards_of(self.attempt)):
                logger.info("%s is not of attempt %d: passed over", message.path, self.attempt)
                continue
            told.append(message)
        if told:
            leases = [(*key, self.held[key].serial) for one in told for key in _ended_by(one) if key in self.held]
            self._outbox.add(Notice(self.world, self.attempt, tuple(told), tuple(leases)))
        self._try("tell", self._write_notices, None)

    @property
    def num_untold(self) -> int:
        """Notices that the disk has refused until now."""
        return len(self._outbox)

    def beat(self, version: int) -> None:
        """Says that the world lives, when it is time to; `version` is of the weights that it samples with. Joins again
        if the head has given it up; puts back what lies in its folder and no `claim` has returned."""
        if self.attempt is None:
            return
        now = self._clock()
        if version != self._version:
            self._version, self._beat_due = version, 0.0
        if now >= self._beat_due:
            self._try("beat", lambda: self._beat(now), None)
        self._try("tell", self._write_notices, None)

    def leave(self) -> None:
        """In order: tells what is untold, puts back what it still holds and says so; the head clears up."""
        if self.attempt is None:
            return
        self._try("tell", self._write_notices, None)
        for lease in list(self.held.values()):
            self._try("leave", lambda lease=lease: self._put_back(_name(lease)), None)  # type: ignore[misc]
        self.held.clear()
        if not self._must_join:
            self._try("leave", lambda: self._is_known() and self._write_world(left=True), False)
        self.attempt, self._must_join = None, True

    def _try(self, what: str, action: Callable[[], T], otherwise: T) -> T:
        """A refusal is for the next call to mend, unless it lasts."""
        try:
            result = action()
        except OSError as error:
            now = self._clock()
            since = self._trouble_since.setdefault(what, now)
            if now == since:
                logger.warning("world %s, %s: %s; it is tried again", self.world, what, error)
            if now - since > TROUBLE_SECONDS and not files.is_full(error):
                raise
            return otherwise
        self._trouble_since.pop(what, None)
        return result

    def _beat(self, now: float) -> None:
        if self._must_join or not self._is_known() or not self._write_world():
            self._must_join = True
            logger.warning("world %s joins again, with %d groups", self.world, len(self.held))
            self._join()
        for name in self._found_in_folder():
            self._put_back(name)
        self._beat_due = now + (self._state.beat_seconds if self._state else 0.0)

    def _join(self) -> None:
        """A new membership: folders, a new stream of notices, a sign of life. What an earlier process of the same name
        held goes back."""
        before = lease_files.read_record(world_file(self.run, self.world), WorldState)
        if before is not None and before.incarnation != self._incarnation:
            for name in lease_files.leases_in(held_folder(self.run, self.world)):
                self._put_back(name)
        self._num_joins += 1
        self._outbox.begin_stream(f"{self._incarnation}-{self._num_joins:04d}")
        files.make_folder(held_folder(self.run, self.world))
        self._must_join = not self._write_world()

    def _is_known(self) -> bool:
        """Whether the folder is there, and still this process's own."""
        there = lease_files.read_record(world_file(self.run, self.world), WorldState)
        if there is None:
            return lease_files.is_there(world_file(self.run, self.world))
        if there.incarnation != self._incarnation:
            raise WorldSuperseded(
                f"world {self.world} of {self.run.path} is attached by another process too "
                f"(on {there.host or 'an unknown host'}, job {there.job_id or 'unknown'}): each needs a name of its own"
            )
        return True

    def _write_world(self, left: bool = False) -> bool:
        """False when the folder is gone."""
        assert self.attempt is not None
        self._counter += 1
        held = tuple(sorted((*key, lease.serial) for key, lease in self.held.items()))
        state = WorldState(
            attempt=self.attempt, counter=self._counter, incarnation=self._incarnation, slots=self.slots,
            num_ranks=self.num_ranks, version=self._version, held=held, host=self.host, job_id=self.job_id, left=left,
        )  # fmt: skip
        try:
            lease_files.write_visible(world_file(self.run, self.world), msgspec.json.encode(state))
        except FileNotFoundError:
            return False
        return True

    def _write_notices(self) -> None:
        for leases in self._outbox.write():
            for group, try_number, serial in leases:
                lease = self.held.get((group, try_number))
                if lease is not None and lease.serial == serial:
                    self._end(lease)

    def _end(self, lease: Lease) -> None:
        del self.held[_key(lease)]
        self._ended[lease.serial] = _name(lease)
        self._remove_ended(_name(lease))

    def _remove_ended(self, name: LeaseName) -> None:
        try:
            files.remove(held_folder(self.run, self.world) / str(name))
        except OSError as error:
            logger.debug("lease %s stays for now: %s", name, error)

    def _claim_into(self, claimed: list[Assign], limit: int, version: int) -> None:
        offered, held = offered_folder(self.run), held_folder(self.run, self.world)
        for name in self._found_in_folder()[:limit]:
            if lease := self._take(name):
                claimed.append(lease.assign)
        for name in self._in_own_order(lease_files.leases_in(offered), limit, version):
            if len(claimed) >= limit:
                return
            try:
                is_ours = lease_files.move(offered / str(name), held / str(name))
            except FileNotFoundError:
                is_ours = False
            if is_ours and (lease := self._take(name)):
                claimed.append(lease.assign)
            elif not is_ours and not lease_files.is_there(held):
                self._beat_due = 0.0
                return

    def _found_in_folder(self) -> list[LeaseName]:
        """Leases in `held/` of which this process does not know: moves that were reported as failed. Those that have
        ended are removed, again if need be, and forgotten once they are not seen any more."""
        names = lease_files.leases_in(held_folder(self.run, self.world))
        self._ended = {name.serial: name for name in names if name.serial in self._ended}
        for name in self._ended.values():
            self._remove_ended(name)
        known = {lease.serial for lease in self.held.values()} | self._ended.keys()
        return sorted(name for name in names if name.serial not in known and name.attempt == self.attempt)

    def _take(self, name: LeaseName) -> Lease | None:
        """Opens a lease that lies in `held/`; None when it does not any more, or is no use: the head offers the group
        again."""
        path = held_folder(self.run, self.world) / str(name)
        try:
            lease = msgspec.msgpack.decode(files.read_bytes(path, retry_seconds=1.0), type=Lease)
        except msgspec.DecodeError:
            logger.warning("lease %s is damaged", name)
            files.remove(path)
            return None
        except OSError as error:
            if error.errno not in files.LATE:
                raise
            return None
        if (known := self.held.get(name.key)) is not None:
            if known.serial != name.serial:
                self._put_back(name)
            return None
        if self.config_hash and lease.config_hash != self.config_hash:
            self._put_back(name)
            raise OtherConfiguration(
                f"world {self.world} samples in another way than the run (hash {self.config_hash}, the run has "
                f"{lease.config_hash}): model, data, gconfig, workflow, reward and seed must be the run's own"
            )
        self.held[name.key] = lease
        return lease

    def _put_back(self, name: LeaseName) -> None:
        lease_files.move(held_folder(self.run, self.world) / str(name), offered_folder(self.run) / str(name))

    def _in_own_order(self, offers: Iterable[LeaseName], limit: int, version: int) -> list[LeaseName]:
        suitable = sorted(
            name for name in offers
            if name.attempt == self.attempt and name.min_version <= version and name.key not in self.held
        )  # fmt: skip
        window = limit * max(1, min(self._state.num_worlds if self._state else 1, MAX_RIVALS))
        first = suitable[:window]
        self._random.shuffle(first)
        return first + suitable[window:]


def _key(lease: Lease) -> GroupKey:
    return lease.assign.group, lease.assign.try_number


def _name(lease: Lease) -> LeaseName:
    return LeaseName(*_key(lease), lease.assign.min_version, lease.attempt, lease.serial)


def _ended_by(message: Told) -> list[GroupKey]:
    if isinstance(message, Published):
        return [(group.group, group.try_number) for group in message.groups]
    return [(message.group, message.try_number)] if isinstance(message, Rejected) else []
