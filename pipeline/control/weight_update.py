"""One weight transfer after the other: who takes part, who is ready, who has confirmed.

```
 engines that do not serve the version ─► Prepare ─► all ready, or the limit ─► Load, Publish ─► sent, all answered
        ▲                                    │ some failed, or not in time: a new epoch of the others │
        └────────────────────────────────────┴────────────────────────────────────────────────────────┘
```
After a step `bring` waits for this; engines that come back later (built anew, or only slow) are brought the version by
`catch_up` beside the wait for the next batch, in an epoch of their own, while the others go on. Every wait has a limit:
`weights.ready_seconds` (`drain_seconds`) to stop, `bucket_seconds` for each bucket and for the last answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pekoe.pipeline.config.schedule import WeightsConfig
from pekoe.pipeline.control.disk_watch import RETRY_SECONDS, DiskWatch
from pekoe.pipeline.control.engine_roster import EngineRecord, EngineRoster
from pekoe.pipeline.control.logprob_gap import Gap, GapLimit
from pekoe.pipeline.control.pump import LONGEST_TURN, SHOWN_RANKS, NoProgress, Pump
from pekoe.pipeline.messages import (
    EngineFailed,
    EngineRestored,
    LoadWeights,
    Post,
    PrepareWeights,
    PublishWeights,
    TensorSpec,
    WeightsLoaded,
    WeightsReady,
    WeightsSent,
)

logger = logging.getLogger(__name__)

MAX_TRANSFER_TRIES = 3
WHO = "the weights"


class WeightUpdateError(RuntimeError):
    """Weights could not be brought to engines that stand."""


class LostEngineError(NoProgress):
    """An engine has been down or silent for too long."""


class WaitClock:
    """Seconds waited; a gap between two looks (the whole process stood still) counts as little."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._looked, LONGEST_TURN)
        self._looked = now
        return self.seconds


@dataclass
class Transfer:
    """One version on its way to some engines."""

    version: int
    epoch: int
    members: tuple[int, ...]
    """World ranks of the transfer group, the sender first; the sender may be an engine's rank too (colocated)."""
    engines: list[EngineRecord]
    """Those of `members` that are still in it."""
    ready: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks whose engine has failed meanwhile, and why."""
    is_published: bool = False
    sent: WeightsSent | None = None
    loaded: dict[int, WeightsLoaded] = field(default_factory=dict)
    asked: WaitClock = field(default_factory=WaitClock)
    after_sent: WaitClock | None = None

    def lacking(self, answered: set[int] | dict[int, WeightsLoaded]) -> list[int]:
        """Ranks that have not answered and still can."""
        return [
            rank
            for engine in self.engines
            if not self.lost.keys() & engine.ranks
            for rank in engine.ranks
            if rank not in answered
        ]


class EpochOpener(Protocol):
    """`WeightSender.open_epoch`."""

    def __call__(self, epoch: int, members: tuple[int, ...], /) -> str: ...


@dataclass
class WeightUpdates:
    """The transfer group of an epoch is kept while membership is unchanged; a failure opens a new epoch."""

    post: Post
    limits: WeightsConfig
    trainer_ranks: Sequence[int]
    rollout_ranks: Sequence[int]
    open_epoch: EpochOpener
    tensor_specs: Callable[[], tuple[TensorSpec, ...]]
    gap_limit: GapLimit
    instances: Sequence[Sequence[int]] = ()
    """Ranks that make one engine together; empty: each makes its own."""
    first_version: int = 0
    """What the engines serve when they begin."""
    epoch: int = -1
    version: int = -1
    kept_members: tuple[int, ...] = ()
    """Of the present epoch, while its group works."""
    transfer: Transfer | None = None
    failures: int = 0
    """Of transfers of this version in a row, none of whose members was lost."""
    not_before: float = 0.0
    stood_still: float = 0.0
    """Longest that decoding stood still for this version (seconds)."""
    trainer_check: tuple[float, ...] = ()
    checks: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Log-probs of the check sequences at this version, by rank."""

    def __post_init__(self) -> None:
        self.roster = EngineRoster(self.instances or [(rank,) for rank in self.rollout_ranks], self.first_version)

    def listen(self, pump: Pump, tell_available: Callable[[int, bool], None]) -> None:
        """Messages of engines reach this object from here on; `tell_available(leader, …)` says who may get groups."""
        self.roster.tell = tell_available
        pump.handlers.update(
            {
                WeightsReady: self.on_ready,
                WeightsSent: lambda source, message: self.on_sent(message),
                WeightsLoaded: self.on_loaded,
                EngineFailed: self.on_failed,
                EngineRestored: lambda source, message: self.roster.restore(source),
            }
        )

    def bring(self, version: int, pump: Pump, may_give_up: Callable[[], bool]) -> float:
        """Brings every engine that stands to this version; gives for how many seconds the slowest one stood still.

        Engines that fail or do not stop in time are left to `catch_up`. A failed transfer is tried again in a new
        group. Raises WeightUpdateError after MAX_TRANSFER_TRIES without a cause in one of the engines. What only lacks
        room on the disk is tried until there is some, or `may_give_up`.
        """
        if self.transfer is not None and self.transfer.is_published:
            self._await_arrival(pump)
        self.transfer = None
        self._begin_version(version)
        while self.transfer is not None or self.roster.behind(version):
            if self.transfer is not None and self.transfer.is_published:
                self._await_arrival(pump)
                continue
            seconds, key = self.ready_limit
            pump.wait(
                lambda: (self._moves(version, pump) or may_give_up()) or None,
                "engines to stop at a token",
                seconds + LONGEST_TURN,
                self.not_ready,
                key=key,
            )
            if may_give_up() and (self.transfer is None or not self.transfer.is_published):
                self.transfer = None
                break
        return self.stood_still

    def catch_up(self, version: int, pump: Pump) -> None:
        """At a step boundary, often: goes on with bringing this version to engines that came back."""
        if version != self.version:
            self._begin_version(version)
        self.advance(version, pump)

    def advance(self, version: int, pump: Pump) -> None:
        """One look: what can be done now is done. Raises WeightUpdateError, LostEngineError."""
        self._check_lost(pump)
        transfer = self.transfer
        if transfer is None:
            if time.monotonic() >= self.not_before and (behind := self.roster.behind(version)):
                self._begin(version, behind)
        elif transfer.is_published:
            if self._is_over(transfer):
                self._settle(transfer, pump.disk)
        elif not transfer.lacking(transfer.ready) or transfer.asked.look() > self.ready_limit[0]:
            self._close_membership(transfer)

    def on_ready(self, rank: int, message: WeightsReady) -> None:
        self.roster.hear(rank)
        transfer = self.transfer
        if transfer is not None and (message.version, message.epoch) == (transfer.version, transfer.epoch):
            transfer.ready.add(rank)

    def on_sent(self, message: WeightsSent) -> None:
        if self.transfer is not None and self.transfer.is_published and message.version == self.transfer.version:
            self.transfer.sent = message
            self.transfer.after_sent = WaitClock()

    def on_loaded(self, rank: int, message: WeightsLoaded) -> None:
        """Also one that was not waited for any more."""
        self.roster.hear(rank)
        transfer, engine = self.transfer, self.roster.by_rank[rank]
        if transfer is not None and transfer.is_published and engine in transfer.engines:
            if message.version == transfer.version:
                transfer.loaded[rank] = message
        elif (message.version, message.error) == (self.version, "") and len(engine.ranks) == 1 and engine.since is None:
            self.roster.serve(engine, message.version)

    def on_failed(self, rank: int, message: EngineFailed) -> None:
        logger.warning(
            "the engine of rank %d has failed and is built anew (%d): %s", rank, message.restarts, message.reason
        )
        self.roster.fail(rank, message.reason)
        if self.transfer is not None and rank in self.transfer.members[1:]:
            self.transfer.lost[rank] = message.reason

    @property
    def ready_limit(self) -> tuple[float, str]:
        """How long engines have to stop, and the key that says so."""
        if self.limits.update_mode == "drain":
            return self.limits.drain_seconds, "weights.drain_seconds"
        return self.limits.ready_seconds, "weights.ready_seconds"

    def not_ready(self) -> list[int]:
        """Engines that have not stopped yet."""
        return [] if self.transfer is None else self.transfer.lacking(self.transfer.ready)

    def unanswered(self) -> list[int]:
        """Who has not answered yet: the sender, engines."""
        if self.transfer is None:
            return []
        sender = [self.trainer_ranks[0]] if self.transfer.sent is None else []
        return sender + self.transfer.lacking(self.transfer.loaded)

    def logprob_gap(self) -> Gap:
        """On the check sequences, over engines that loaded; EnginesDisagreeError above the limit."""
        checks = {rank: check for rank, check in self.checks.items() if check}
        return self.gap_limit.judge(self.version, self.trainer_check, checks)

    def _check_lost(self, pump: Pump) -> None:
        engine = self.roster.away_for(pump.limit)
        if engine is not None and engine.since is not None:
            ranks = sorted(engine.silent or engine.ranks)
            raise LostEngineError(
                f"the engine of rank {engine.leader} {engine.state} for {time.monotonic() - engine.since:.0f} s "
                f"(cluster.progress_seconds is {pump.limit:g}): {engine.reason}",
                ranks,
                pump.stacks_of(ranks[:SHOWN_RANKS]),
            )

    def _begin_version(self, version: int) -> None:
        self.version, self.failures, self.stood_still = version, 0, 0.0
        self.checks.clear()

    def _await_arrival(self, pump: Pump) -> None:
        """Until the tensors under way have arrived, or not."""
        transfer = self.transfer
        assert transfer is not None
        pump.wait(
            lambda: self._has_arrived(transfer, pump) or None,
            f"weights of version {transfer.version} to arrive",
            on=self.unanswered,
        )

    def _has_arrived(self, transfer: Transfer, pump: Pump) -> bool:
        self.advance(transfer.version, pump)
        return self.transfer is not transfer

    def _moves(self, version: int, pump: Pump) -> bool:
        """Whether there is nothing to wait for before the tensors go, or nobody to bring them to."""
        self.advance(version, pump)
        if self.transfer is None:
            return not self.roster.behind(version)
        return self.transfer.is_published

    def _begin(self, version: int, engines: list[EngineRecord]) -> None:
        """Tells these engines to stop at a token for `version`."""
        members = (self.trainer_ranks[0], *sorted(rank for engine in engines for rank in engine.ranks))
        endpoint = ""
        specs: tuple[TensorSpec, ...] = ()
        if members != self.kept_members:
            self.epoch += 1
            endpoint = self.open_epoch(self.epoch, members)
            specs = self.tensor_specs()
        self.kept_members = ()
        self.transfer = Transfer(version, self.epoch, members, list(engines))
        message = PrepareWeights(version, self.epoch, members, endpoint, specs)
        for rank in members[1:]:
            self.post.send(rank, message)

    def _close_membership(self, transfer: Transfer) -> None:
        """Everybody who is ready takes part. When that is not everybody who was asked, they meet in a new epoch."""
        seconds, key = self.ready_limit
        for engine in list(transfer.engines):
            silent = [rank for rank in engine.ranks if rank not in transfer.ready]
            if transfer.lost.keys() & engine.ranks:
                transfer.engines.remove(engine)
            elif silent:
                transfer.engines.remove(engine)
                text = f"rank {silent[0]} was not ready for version {transfer.version} within {seconds:g} s ({key})"
                self.roster.stall(engine, silent, text)
        ranks = sorted(rank for engine in transfer.engines for rank in engine.ranks)
        if not ranks:
            self.transfer = None
        elif tuple(ranks) != transfer.members[1:]:
            self._begin(transfer.version, transfer.engines)
        else:
            self._publish(transfer)

    def _publish(self, transfer: Transfer) -> None:
        """Every member is ready: engines take, the trainer ranks stream."""
        transfer.is_published = True
        for rank in transfer.members[1:]:
            self.post.send(rank, LoadWeights(transfer.version, transfer.epoch))
        for rank in self.trainer_ranks:
            self.post.send(rank, PublishWeights(transfer.version, transfer.epoch, transfer.members))

    def _is_over(self, transfer: Transfer) -> bool:
        """Sender and engines have all answered, well or not; who has not long after the sender is not waited for."""
        if transfer.sent is None or transfer.after_sent is None:
            return False
        lacking = transfer.lacking(transfer.loaded)
        if lacking and transfer.after_sent.look() <= self.limits.bucket_seconds:
            return False
        for engine in transfer.engines:
            if silent := [rank for rank in engine.ranks if rank in lacking]:
                text = (
                    f"rank {silent[0]} did not say that it serves version {transfer.version} within "
                    f"{self.limits.bucket_seconds:g} s (weights.bucket_seconds)"
                )
                self.roster.stall(engine, silent, text)
        return True

    def _settle(self, transfer: Transfer, disk: DiskWatch) -> None:
        """The transfer is over: who serves the version now, and what went wrong. A failure closes the epoch."""
        self.transfer = None
        assert transfer.sent is not None
        if transfer.sent.disk_is_full:
            disk.refuse(WHO, f"sender: {transfer.sent.error}")
            self.not_before = time.monotonic() + RETRY_SECONDS
            return
        disk.accept(WHO)
        for engine in transfer.engines:
            self._count(transfer, engine)
        self.logprob_gap()
        errors = [f"engine on rank {rank}: {m.error}" for rank, m in sorted(transfer.loaded.items()) if m.error]
        errors += [f"engine on rank {rank} failed: {reason}" for rank, reason in sorted(transfer.lost.items())]
        lost = bool(transfer.lost) or any(engine.stalled_since is not None for engine in transfer.engines)
        if transfer.sent.error:
            errors.append(f"sender: {transfer.sent.error}")
        if not errors and not lost:
            self.kept_members, self.failures = transfer.members, 0
            return
        number = self.failures + 1
        self.failures = self.failures if lost else number
        text = "; ".join(errors)
        logger.warning("transfer of version %d failed (try %d): %s", transfer.version, number, text)
        if self.failures == MAX_TRANSFER_TRIES:
            raise WeightUpdateError(f"version {transfer.version} could not be brought to the engines: {text}")

    def _count(self, transfer: Transfer, engine: EngineRecord) -> None:
        """Whether an engine of the finished transfer serves its version."""
        answers = [transfer.loaded[rank] for rank in engine.ranks if rank in transfer.loaded]
        if transfer.lost.keys() & engine.ranks or len(answers) < len(engine.ranks) or any(m.error for m in answers):
            return
        assert transfer.sent is not None
        self.trainer_check = transfer.sent.check
        self.stood_still = max(self.stood_still, *(m.seconds for m in answers))
        for rank in engine.ranks:
            if check := transfer.loaded[rank].check:
                self.checks[rank] = check
        self.roster.serve(engine, transfer.version)
