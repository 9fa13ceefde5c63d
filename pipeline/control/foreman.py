"""The control loop of an attached world, on its rank 0: between a run's lease files and this world's rollout ranks.

    look       what does the head say: attempt, version and where its weights lie, does it starve, is it over
    follow     the run is in another attempt: what was sampled for the old one and is not published is thrown away
    update     engines stop, load the version from disk, go on; one that fails or is silent is left out, and loads once
               it is there again
    claim      as many offers as there is room for; each goes to the least loaded rank
    publish    ranks flush their open shards when the head starves, or after a short time; then their notices go out

The world samples only with weights that its head asks for, so admission and the bound on staleness hold over all
worlds. It ends by itself when the run is over, or when the head shows no progress for `orphan_seconds`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pekoe.pipeline.messages import (
    Assign,
    Cancel,
    DiskRefused,
    EngineFailed,
    EngineRestored,
    Finished,
    Flush,
    Follow,
    Hello,
    Inbox,
    LoadWeights,
    Message,
    Post,
    PrepareWeights,
    Published,
    Rejected,
    StopRollout,
    WeightsLoaded,
    WeightsReady,
)
from pekoe.pipeline.observe.phases import SetPhase

logger = logging.getLogger(__name__)

INBOX_KINDS: tuple[type[Message], ...] = (
    Hello, Finished, Published, Rejected, DiskRefused, WeightsReady, WeightsLoaded, EngineFailed, EngineRestored,
)  # fmt: skip
FINISHED, STOPPED = "finished", "stopped"
MAX_LOAD_TRIES = 5
FLUSH_SECONDS = 2.0
"""How long a finished group lies in an open shard of an attached world at most."""


class OfferedWeights(Protocol):
    """A version on disk."""

    @property
    def version(self) -> int: ...
    @property
    def token(self) -> str: ...


class Board(Protocol):
    """What the head says."""

    @property
    def attempt(self) -> int: ...
    @property
    def weights(self) -> OfferedWeights | None: ...
    @property
    def config_hash(self) -> str: ...
    @property
    def starving(self) -> bool: ...
    @property
    def outcome(self) -> str: ...
    @property
    def seconds_unchanged(self) -> float: ...


class Leases(Protocol):
    """The files, from this world's side (`leases/lease_holder.py`)."""

    def look(self) -> Board | None: ...
    def claim(self, limit: int, version: int) -> list[Assign]: ...
    def follow(self, attempt: int) -> list[tuple[int, int]]: ...
    def cancelled(self) -> list[tuple[int, int]]: ...
    def tell(self, messages: Sequence[Message]) -> None: ...
    def beat(self, version: int) -> None: ...
    def leave(self) -> None: ...


class AttachedWorldError(RuntimeError):
    """The world cannot serve the run."""


@dataclass
class ForemanParts:
    """What `runs/rl_attached.py` passes in."""

    post: Post
    inbox: Inbox
    ranks: Sequence[int]
    """Rollout ranks of this world that run workflows, one an engine."""
    leases: Leases
    slots: int
    """Groups that this world takes at once."""
    config_hash: str
    poll_seconds: float
    orphan_seconds: float
    ready_seconds: float
    setup_seconds: float
    load_seconds: float
    away_seconds: float
    """How long an engine may be away: built anew, or silent."""
    grace_seconds: float
    """From a stop signal to the end: for publishing what is done."""
    stop_requested: Callable[[], bool]
    set_phase: SetPhase
    followers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Ranks that lend their device to the engine of one of `ranks`: they hear of weights, and of the end."""


@dataclass
class RankLoad:
    """One rollout rank."""

    held: set[tuple[int, int]] = field(default_factory=set)
    """Groups that it samples, or has in its open shard."""
    finished_since: float | None = None
    """Since when a finished group lies in its open shard."""
    flush_asked: bool = False
    serves: tuple[int, int, str] | None = None
    """(attempt, version, token) of its weights."""
    away_since: float | None = None
    """Since when its engine is being built anew, or silent."""
    is_down: bool = False
    reason: str = ""


class Foreman:
    """Runs on its own thread on rank 0 of an attached world."""

    def __init__(self, parts: ForemanParts) -> None:
        self.parts = parts
        self.loads = {rank: RankLoad() for rank in parts.ranks}
        self.holders: dict[tuple[int, int], int] = {}
        self.attempt = -1
        self.loaded: tuple[int, int, str] | None = None
        """(attempt, version, token) that engines serve: those that are there."""
        self.wanted: tuple[int, int, str] | None = None
        """What `failures` is about."""
        self.version = -1
        self.epoch = 0
        self.failures = 0
        self.ready: set[int] = set()
        self.answers: dict[int, WeightsLoaded] = {}
        self.hello: set[int] = set()
        self.notices: list[Message] = []
        self.alone_since: float | None = None
        """Since when the run is looked for, while it has said nothing yet."""

    def run(self) -> str:
        """Until the run is over, the head is silent for too long, or a stop is asked for. `finished` or `stopped`."""
        everybody = [rank for leader in self.loads for rank in self._engine_ranks(leader)]
        self._wait(lambda: len(self.hello) == len(everybody), "rollout ranks to start", self.parts.setup_seconds)
        outcome = ""
        while not outcome:
            outcome = self.turn()
        self._publish_what_is_done()
        self.parts.leases.leave()
        for rank in everybody:
            self.parts.post.send(rank, StopRollout(outcome))
        return outcome

    def _engine_ranks(self, leader: int) -> list[int]:
        return [leader, *self.parts.followers.get(leader, ())]

    def turn(self) -> str:
        """One look at the files, and what follows from it; empty, or how the world ends."""
        board = self.parts.leases.look()
        if self.parts.stop_requested():
            return STOPPED
        if board is None:
            self._pump("waiting for the run to offer work")
            self.alone_since = self.alone_since or time.monotonic()
            return self._orphaned(time.monotonic() - self.alone_since)
        if board.outcome == FINISHED:
            logger.info("the run is finished")
            return FINISHED
        if outcome := self._orphaned(board.seconds_unchanged):
            return outcome
        if board.config_hash != self.parts.config_hash:
            raise AttachedWorldError(
                "the run samples by another configuration now (it was resumed with other settings); attach a new world"
            )
        if board.attempt != self.attempt:
            self._follow(board.attempt)
        self._check_engines()
        if board.weights is not None:
            wanted = (self.attempt, board.weights.version, board.weights.token)
            if behind := [rank for rank in self._present() if self.loads[rank].serves != wanted]:
                self._load(wanted, behind)
        if self.loaded is not None and self.loaded[0] == self.attempt and not board.outcome:
            self._claim()
        self._flush(board.starving)
        self._send_notices()
        self.parts.leases.beat(self.version)
        self._pump("serving the run" if self.holders else "waiting for offers")
        return ""

    def _orphaned(self, seconds: float) -> str:
        """How the world ends when nothing was heard of the head for so long; empty while it may wait."""
        if seconds <= self.parts.orphan_seconds:
            return ""
        logger.error(
            "the head has shown no progress for %.0f s (rollout_array.orphan_seconds): this world ends", seconds
        )
        return FINISHED

    def _follow(self, attempt: int) -> None:
        """What is published of the old attempt stays on disk; the head of the new one finds it there."""
        given_up = self.parts.leases.follow(attempt)
        if self.attempt >= 0:
            logger.info(
                "the run is in attempt %d now; %d leases of the one before are given up", attempt, len(given_up)
            )
        self.attempt, self.loaded, self.failures = attempt, None, 0
        self.holders.clear()
        self.notices.clear()
        for rank, old in self.loads.items():
            self.loads[rank] = RankLoad(away_since=old.away_since, is_down=old.is_down, reason=old.reason)
            self.parts.post.send(rank, Follow(attempt))

    def _present(self) -> list[int]:
        """Ranks whose engines are there."""
        return [rank for rank, load in self.loads.items() if load.away_since is None]

    def _check_engines(self) -> None:
        """An engine may be away for a while, not for ever."""
        now = time.monotonic()
        for rank, load in self.loads.items():
            if load.away_since is not None and now - load.away_since > self.parts.away_seconds:
                raise AttachedWorldError(
                    f"the engine of rank {rank} is away for {now - load.away_since:.0f} s (cluster.progress_seconds is "
                    f"{self.parts.away_seconds:g}): {load.reason}"
                )

    def _load(self, wanted: tuple[int, int, str], ranks: Sequence[int]) -> None:
        """These ranks at once: they stop, load, go on. Who fails or does not answer in time is left out until it is
        heard of again. A version that is gone by then is no failure of this world: the next look names a newer one."""
        _, version, token = wanted
        if wanted != self.wanted:
            self.wanted, self.failures = wanted, 0
        self.epoch += 1
        self.ready.clear()
        self.answers.clear()
        for rank in (member for leader in ranks for member in self._engine_ranks(leader)):
            self.parts.post.send(rank, PrepareWeights(version, self.epoch, tuple(ranks), token, ()))
        ranks = self._await_ranks(ranks, self.ready, "engines to stop at a token", self.parts.ready_seconds)
        for rank in (member for leader in ranks for member in self._engine_ranks(leader)):
            self.parts.post.send(rank, LoadWeights(version, self.epoch))
        self._await_ranks(ranks, self.answers, f"version {version} to be loaded", self.parts.load_seconds)
        loaded = [rank for rank, answer in self.answers.items() if not answer.error and not self.loads[rank].is_down]
        for rank in loaded:
            self.loads[rank].serves = wanted
        if loaded:
            self.loaded, self.version = wanted, version
        errors = [f"rank {rank}: {answer.error}" for rank, answer in sorted(self.answers.items()) if answer.error]
        if not errors:
            self.failures = 0
            return
        logger.warning("version %d did not load: %s", version, "; ".join(errors))
        board = self.parts.leases.look()
        if board is None or board.weights is None or board.weights.token != token or board.weights.version != version:
            return
        self.failures += 1
        if self.failures == MAX_LOAD_TRIES:
            raise AttachedWorldError(f"version {version} did not load {self.failures} times: {'; '.join(errors)}")

    def _await_ranks(
        self, ranks: Sequence[int], answered: Container[int], reason: str, limit_seconds: float
    ) -> list[int]:
        """Until each of them has answered, or its engine has failed; those that have neither by then are left out."""

        def lacking() -> list[int]:
            return [rank for rank in ranks if rank not in answered and not self.loads[rank].is_down]

        if not self._wait(lambda: not lacking(), reason, limit_seconds, raises=False):
            for rank in lacking():
                logger.warning("rank %d is left out for now: waited %g s for %s", rank, limit_seconds, reason)
                self._lose(rank, f"waited {limit_seconds:g} s for {reason}")
        return [rank for rank in ranks if self.loads[rank].away_since is None]

    def _lose(self, rank: int, reason: str) -> None:
        load = self.loads[rank]
        load.away_since, load.serves, load.reason = load.away_since or time.monotonic(), None, reason

    def _claim(self) -> None:
        for key in self.parts.leases.cancelled():
            rank = self.holders.pop(key, None)
            if rank is not None:
                self.loads[rank].held.discard(key)
                self.parts.post.send(rank, Cancel(*key))
        serving = [rank for rank in self._present() if self.loads[rank].serves == self.loaded]
        free = self.parts.slots * len(serving) // len(self.loads) - len(self.holders)
        for assign in self.parts.leases.claim(free, self.version) if free > 0 else ():
            rank = min(serving, key=lambda rank: len(self.loads[rank].held))
            key = (assign.group, assign.try_number)
            self.holders[key] = rank
            self.loads[rank].held.add(key)
            self.parts.post.send(rank, assign)

    def _flush(self, starving: bool) -> None:
        now = time.monotonic()
        for rank, load in self.loads.items():
            since = load.finished_since
            if since is None or load.flush_asked:
                continue
            if starving or now - since >= FLUSH_SECONDS:
                load.flush_asked = True
                self.parts.post.send(rank, Flush())

    def _send_notices(self) -> None:
        if self.notices:
            notices, self.notices = self.notices, []
            self.parts.leases.tell(notices)

    def _publish_what_is_done(self) -> None:
        """Groups whose episodes are over are published and told; what still runs goes back to the board."""
        self.parts.set_phase("publishing what is done")
        for rank, load in self.loads.items():
            if load.finished_since is not None:
                self.parts.post.send(rank, Flush())
        deadline = time.monotonic() + self.parts.grace_seconds / 2
        while time.monotonic() < deadline and any(load.finished_since is not None for load in self.loads.values()):
            self._take(0.1)
        self._send_notices()

    def _wait(self, until: Callable[[], bool], reason: str, limit: float, raises: bool = True) -> bool:
        """Pumps messages and shows life until then. After `limit` seconds AttachedWorldError, or False."""
        began = time.monotonic()
        while not until():
            self.parts.set_phase(f"waiting for {reason}", limit=limit)
            self._take(self.parts.poll_seconds)
            self._send_notices()
            self.parts.leases.beat(self.version)
            if time.monotonic() - began > limit:
                if raises:
                    raise AttachedWorldError(f"waited {limit:g} s for {reason}")
                return False
        return True

    def _pump(self, phase: str) -> None:
        """What arrives within a poll interval; returns early when there is something to tell."""
        self.parts.set_phase(phase)
        end = time.monotonic() + self.parts.poll_seconds
        while (left := end - time.monotonic()) > 0:
            self._take(left)
            if self.notices:
                return

    def _take(self, timeout: float) -> None:
        try:
            source, message = self.parts.inbox.get(timeout=timeout)
        except queue.Empty:
            return
        self._handle(source, message)
        while not self.parts.inbox.empty():
            self._handle(*self.parts.inbox.get())

    def _handle(self, source: int, message: Message) -> None:
        match message:
            case Hello():
                self.hello.add(source)
            case Finished():
                if (message.group, message.try_number) in self.holders:
                    load = self.loads[source]
                    load.finished_since = load.finished_since or time.monotonic()
            case Published():
                load = self.loads[source]
                load.finished_since, load.flush_asked = None, False
                for group in message.groups:
                    self._end((group.group, group.try_number))
                if message.path.startswith(f"shards/{self.attempt}-"):
                    self.notices.append(message)
            case Rejected():
                self._end((message.group, message.try_number))
                self.notices.append(message)
            case DiskRefused():
                self.notices.append(message)
            case WeightsReady() | WeightsLoaded() if source not in self.loads:
                pass  # it lends its device: the leader of its engine answers for it
            case WeightsReady():
                self._hear(source)
                if message.epoch == self.epoch:
                    self.ready.add(source)
            case WeightsLoaded():
                self._hear(source)
                if source in self.ready:
                    self.answers[source] = message
            case EngineFailed():
                self.loads[source].is_down = True
                self._lose(source, message.reason)
            case EngineRestored():
                self.loads[source].is_down, self.loads[source].away_since = False, None
            case _:
                raise AssertionError(f"the foreman cannot handle {message!r}")

    def _hear(self, rank: int) -> None:
        """A rank that was silent has answered."""
        if not self.loads[rank].is_down:
            self.loads[rank].away_since = None

    def _end(self, key: tuple[int, int]) -> None:
        rank = self.holders.pop(key, None)
        if rank is not None:
            self.loads[rank].held.discard(key)
