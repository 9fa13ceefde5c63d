"""Who samples what: admits groups from the cursor, hands them to rollout ranks, and accounts for each."""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.admission import Admission
from pekoe.pipeline.control.attached_worlds import BOARD, GroupBoard
from pekoe.pipeline.control.group_table import GroupState, GroupTable, OutstandingGroup
from pekoe.pipeline.control.shelf import Shelf, oldest_version
from pekoe.pipeline.messages import EQUAL_REWARDS, Assign, Cancel, Finished, Flush, Post, Published, Rejected

logger = logging.getLogger(__name__)

FAILURES = ("error", "timeout")
"""Reasons of rejection that say that something is broken; the others are decisions of the workflow."""
RESAMPLED_BATCHES = 8
"""Batches' worth of groups that dynamic sampling replaces per step, where the configuration does not say."""
WAITING = "waiting"
"""State, in a snapshot, of a group that is to be issued again."""


class AdmissionOrder(Protocol):
    """The cursor as the dispatcher uses it (`data/cursor.py`)."""

    def admit(self) -> tuple[int, int] | None: ...
    def close(self, group: int, how: str) -> None: ...
    def owed(self) -> list[int]: ...
    def is_closed(self, group: int) -> bool: ...
    def example(self, group: int) -> int: ...
    def state(self) -> dict[str, Any]: ...


class RolloutFailure(RuntimeError):
    """Groups fail one after the other: the workflow, the reward or the engine is broken."""


@dataclass(frozen=True)
class Loss:
    """A group that ended without being consumed."""

    group: int
    try_number: int
    reason: str


@dataclass
class Losses:
    """Groups that left without being trained on, since the last step: written in the ledger with it."""

    filtered: list[Loss] = field(default_factory=list)
    skipped: list[Loss] = field(default_factory=list)


class RankLoads:
    """The least loaded rollout rank among those that are there, in O(log n)."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.loads = dict.fromkeys(ranks, 0)
        self._away: set[int] = set()
        self._heap = [(0, rank) for rank in ranks]
        heapq.heapify(self._heap)

    def add(self, rank: int, amount: int) -> None:
        self.loads[rank] += amount
        heapq.heappush(self._heap, (self.loads[rank], rank))
        if len(self._heap) > 4 * len(self.loads) + 64:
            self._heap = [(load, one) for one, load in self.loads.items()]
            heapq.heapify(self._heap)

    def set_available(self, rank: int, is_available: bool) -> None:
        if is_available:
            self._away.discard(rank)
            heapq.heappush(self._heap, (self.loads[rank], rank))
        else:
            self._away.add(rank)

    def least(self) -> int | None:
        """None while nobody is there."""
        while self._heap:
            load, rank = self._heap[0]
            if load == self.loads[rank] and rank not in self._away:
                return rank
            heapq.heappop(self._heap)
        return None


class Dispatcher:
    """Owns admission, the table of outstanding groups and the cursor. One thread (the controller's) calls it."""

    def __init__(
        self, config: RunConfig, post: Post, cursor: AdmissionOrder, rollout_ranks: Sequence[int], num_steps: int,
        board: GroupBoard | None = None,
    ) -> None:  # fmt: skip
        self.config, self.post, self.cursor, self.board = config, post, cursor, board
        self.on_board = 0
        """Groups that run on attached worlds, or wait for one."""
        eta, batch = config.rollout.max_head_offpolicyness, config.train_dataset.batch_size
        concurrent = config.rollout.max_concurrent_rollouts or (eta + 1 if eta is not None else 4) * batch
        self.admission = Admission(concurrent, batch, eta)
        self.table = GroupTable(eta, batch)
        self.ranks = RankLoads(rollout_ranks)
        self.away: dict[int, float] = {}
        """Ranks whose engine is not there just now, since when (monotonic seconds)."""
        self.num_steps = num_steps
        self.losses = Losses()
        self.counts: Counter[str] = Counter()
        self.reissues: deque[tuple[int, int, int]] = deque()
        self.tries: dict[int, int] = {}
        self.owed: set[int] = set()
        """In flight in the checkpoint, not admitted again yet."""
        self.shelf = Shelf(eta, config.actor.mb_spec.max_tokens_per_mb)
        self.known_shards: set[str] = set()
        self.resumed_at: int | None = None
        self.data_is_exhausted = False
        self.consecutive_failures = 0
        self.tokens_sampled = 0
        bound = config.rollout.max_resampled_groups
        self.max_resampled = RESAMPLED_BATCHES * batch if bound is None else bound
        self.resampled = 0
        """Groups that dynamic sampling has dropped and replaced since the last step."""

    def state(self) -> dict[str, Any]:
        """Snapshot at a step boundary: plain values for the checkpoint. Groups in flight are those in the table, those
        that wait to be issued again, and those of the last checkpoint whose turn has not come."""
        version = self.admission.version
        in_flight = [
            [group.number, group.try_number, group.admitted_version, group.state.value]
            for group in self.table.groups.values()
        ]
        in_flight += [[number, try_number, version, WAITING] for number, _, try_number in self.reissues]
        in_flight += [[number, self.tries.get(number, 0), version, WAITING] for number in self.cursor.owed()]
        losses = {
            "filtered": [(loss.group, loss.try_number, loss.reason) for loss in self.losses.filtered],
            "skipped": [(loss.group, loss.try_number, loss.reason) for loss in self.losses.skipped],
        }
        counters = {
            "version": version, "running": self.admission.running, "accepted": self.admission.accepted,
            "dropped": len(self.table.dropped), "resampled": self.resampled,
        }  # fmt: skip
        return {
            "cursor": self.cursor.state(), "admission": counters, "in_flight": sorted(in_flight),
            "counts": dict(self.counts), "losses": losses,
        }  # fmt: skip

    def gauges(self) -> dict[str, float]:
        """Counts for heartbeats; may be called from another thread."""
        return {
            "running": float(self.admission.running),
            "ready": float(self.table.num_ready),
            "outstanding": float(len(self.table.groups)),
            "reissues": float(len(self.reissues)),
            "on_board": float(self.on_board),
        }

    def restore(self, state: dict[str, Any], version: int) -> None:
        """After a checkpoint at `version`: what was consumed stays so, nothing runs; open groups come again.

        The cursor was restored by its owner; it gives the open groups first. Once they are admitted again, the capacity
        is that of a run that was never interrupted.
        """
        self.resumed_at = version
        self.admission.version = version
        self.admission.accepted = state["admission"]["accepted"]
        self.table.restore_dropped(state["admission"].get("dropped", 0))
        self.resampled = state["admission"].get("resampled", 0)
        for number, try_number, _, how in state["in_flight"]:
            self.owed.add(number)
            if try_number:
                self.tries[number] = try_number
            if how in (GroupState.FINISHED.value, GroupState.READY.value):
                self.admission.give_back()
        self.counts.update(state["counts"])
        self.losses = Losses(
            [Loss(*loss) for loss in state["losses"]["filtered"]], [Loss(*loss) for loss in state["losses"]["skipped"]]
        )

    def offer(self, notices: Sequence[Published], version: int) -> None:
        """After `restore`: shards of earlier attempts, of weights common to all attempts, are used as they are when the
        cursor comes to their groups; what is too old by then is sampled again."""
        self.resumed_at = version
        self.known_shards.update(notice.path for notice in notices)
        self.shelf.put(notices, version, self.tries, self.cursor.is_closed)
        self.counts.update(adopted=0, issued_again=0)

    def take_idle_shards(self) -> set[str]:
        """Shards published or offered until now in which nothing lies that may still be trained on; each named once."""
        idle = self.known_shards - self.table.shards() - self.shelf.shards()
        self.known_shards -= idle
        return idle

    def admit_all(self) -> None:
        """Admits while there is capacity, data, a step left that needs it, and somebody who can sample."""
        self._take_back_stranded()
        self._take_back_from_away()
        while self.admission.capacity() > 0 and self._wanted() > 0 and (rank := self._place()) is not None:
            if self.reissues:
                number, example, try_number = self.reissues.popleft()
            else:
                admitted = self.cursor.admit()
                if admitted is None:
                    self.data_is_exhausted = True
                    return
                number, example = admitted
                try_number = self.tries.pop(number, 0)
            if not self._adopt(number, example):
                self._assign(number, example, try_number, rank)
                if number in self.owed:
                    self.counts["issued_again"] += 1
            self.owed.discard(number)

    def set_available(self, rank: int, is_available: bool) -> None:
        """Whether the engine of this rank serves. Groups stay with one that is being built anew, for a while."""
        self.ranks.set_available(rank, is_available)
        if is_available:
            self.away.pop(rank, None)
        else:
            self.away.setdefault(rank, time.monotonic())

    def _take_back_from_away(self) -> None:
        """Groups of ranks whose engine is away for longer than `rollout.stale_wait_seconds` are issued again to others
        (same try: a recovery); should both finish one, the first counts. While nobody else is there they stay, and that
        time does not make them late."""
        if not self.away:
            return
        limit = time.monotonic() - self.config.rollout.stale_wait_seconds
        gone = {rank for rank, since in self.away.items() if since < limit}
        if not gone:
            return
        for group in [group for group in self.table.running() if group.rank in gone]:
            self._take_back(group)

    def _take_back(self, group: OutstandingGroup) -> None:
        """From a rank whose engine is away to another one, if there is any."""
        if self.ranks.least() is None and (self.board is None or not self.board.num_ranks()):
            group.since = time.monotonic()
            return
        logger.warning("group %d is taken back from rank %d, whose engine is away", group.number, group.rank)
        self.post.send(group.rank, Cancel(group.number, group.try_number))
        self._stop_running(group)
        self.admission.reject()
        self.table.remove(group.number)
        self.counts["taken_back"] += 1
        self.reissues.append((group.number, group.example, group.try_number))

    def _take_back_stranded(self) -> None:
        """Groups that wait for attached worlds, while none is left, are issued again here (same try: a recovery).
        Without ranks of its own the run waits, and that time does not make them late."""
        if self.board is None:
            return
        for number, try_number in self.board.stranded():
            group = self.table.find(number, try_number)
            if group is None or group.rank != BOARD or group.state is not GroupState.RUNNING:
                continue
            if not self.ranks.loads:
                group.since = time.monotonic()
                continue
            self.board.withdraw(number, try_number)
            self._stop_running(group)
            self.admission.reject()
            self.table.remove(number)
            self.counts["taken_back"] += 1
            self.reissues.append((number, group.example, try_number))

    def _adopt(self, number: int, example: int) -> bool:
        """Takes the group from the shelf instead of having it sampled, if it can still be trained on in time."""
        found = self.shelf.take(number)
        if found is None:
            return False
        shard, published = found
        oldest = oldest_version(published)
        if not self.table.has_room(oldest, self.admission.version):
            return False
        self.admission.adopt()
        self.table.admit(OutstandingGroup(number, published.try_number, example, oldest, -1, time.monotonic()))
        self.table.publish(shard, published)
        self.counts["adopted"] += 1
        return True

    def _wanted(self) -> int:
        """Groups still to admit so that the remaining steps are full."""
        remaining = (self.num_steps - self.admission.version) * self.admission.batch
        return remaining - len(self.table.groups) - len(self.table.dropped)

    def _place(self) -> int | None:
        """Where the next group goes: the least loaded rank, or the board if a rank of the attached worlds has less to
        do; None while there is nobody."""
        own = self.ranks.least()
        if self.board is None or self.board.capacity() <= 0:
            return own
        if own is None or self.on_board < self.ranks.loads[own] * max(self.board.num_ranks(), 1):
            return BOARD
        return own

    def _assign(self, number: int, example: int, try_number: int, rank: int) -> None:
        self.admission.admit()
        version = self.admission.version
        self.table.admit(OutstandingGroup(number, try_number, example, version, rank, time.monotonic()))
        n_samples = self.config.gconfig.n_samples
        assign = Assign(number, try_number, example, n_samples, version, self._drops_equal())
        if rank == BOARD and self.board is not None:
            self.on_board += 1
            self.board.offer(assign)
        else:
            self.ranks.add(rank, 1)
            self.post.send(rank, assign)

    def starve(self, is_starving: bool) -> None:
        """Whether the trainer waits for groups: attached worlds then publish what is done at once."""
        if self.board is not None:
            self.board.starve(is_starving and self.on_board > 0)

    def on_finished(self, message: Finished, holder: int | None = None) -> None:
        """`holder`: the rank that says so, in whose open shard the group lies; None: the one that sampled it."""
        group = self.table.finish(message.group, message.try_number, holder)
        if group is not None:
            self._stop_running(group)
            self.admission.accept()

    def on_published(self, message: Published) -> None:
        self.known_shards.add(message.path)
        for published in message.groups:
            known = self.table.find(published.group, published.try_number)
            if known is None:
                self.counts["late"] += 1
                continue
            was_running = known.state is GroupState.RUNNING
            if self.table.publish(message.path, published) is None:
                self.counts["duplicate"] += 1
                continue
            if was_running:
                self._stop_running(known)
                self.admission.accept()
            self.consecutive_failures = 0
            self.tokens_sampled += sum(row.num_active for row in published.rows)

    def on_rejected(self, message: Rejected) -> None:
        group = self.table.find(message.group, message.try_number)
        if group is None or group.state is not GroupState.RUNNING:
            self.counts["late"] += 1
            return
        self._stop_running(group)
        if message.reason == EQUAL_REWARDS:
            self._on_equal_rewards(group)
            return
        self.admission.reject()
        self.table.remove(group.number)
        self.counts[f"rejected_{message.reason}"] += 1
        if message.reason not in FAILURES:
            how = "skipped" if message.reason == "too_long" else "filtered"
            self._lose(group, how, message.detail or message.reason)
            return
        self.consecutive_failures += 1
        if self.consecutive_failures >= self.config.rollout.max_consecutive_failures:
            raise RolloutFailure(
                f"{self.consecutive_failures} groups failed one after the other "
                f"(rollout.max_consecutive_failures); the last one: {message.reason}\n{message.detail}"
            )
        logger.warning("group %d try %d failed (%s)", group.number, group.try_number, message.reason)
        self._issue_again(group, group.try_number + 1)

    def _drops_equal(self) -> bool:
        """Whether a group that is issued now may be dropped for equal rewards."""
        rollout = self.config.rollout
        return rollout.dynamic_sampling and (rollout.dynamic_batch_size or self.resampled < self.max_resampled)

    def _on_equal_rewards(self, group: OutstandingGroup) -> None:
        """Nothing is learned from the group. It is replaced, or keeps its place in a batch (`dynamic_batch_size`); once
        as many were replaced as a step may, it is sampled again as it is (same try), to be kept."""
        self.consecutive_failures = 0
        if self.config.rollout.dynamic_batch_size:
            self.admission.accept()
            self.table.drop(group.number)
        else:
            self.admission.reject()
            self.table.remove(group.number)
            if self.resampled >= self.max_resampled:
                self.counts["equal_rewards_sampled_again"] += 1
                self.reissues.append((group.number, group.example, group.try_number))
                return
            self.resampled += 1
        self.counts[f"rejected_{EQUAL_REWARDS}"] += 1
        self._lose(group, "filtered", EQUAL_REWARDS)

    def drop_stale(self, version: int, waited_seconds: float) -> None:
        """Applies `rollout.stale_policy` to running groups that hold up the batch at `version`.

        `drop` gives up groups that would be too old for the next step as soon as a batch is ready without them. Under
        either policy nothing is waited for longer than `stale_wait_seconds`.
        """
        rollout, want = self.config.rollout, self.want()
        is_over = waited_seconds >= rollout.stale_wait_seconds
        if not is_over and (rollout.stale_policy == "wait" or len(self.table.ready) < want):
            return
        late = self.table.overdue(version, want)
        if is_over:
            limit = time.monotonic() - rollout.stale_wait_seconds
            late = [g for g in (late or self.table.running()) if g.since < limit]
        for group in late:
            if group.rank in self.away:
                self._take_back(group)
                continue
            age = version - group.admitted_version
            logger.warning("group %d was admitted %d steps ago and still runs: cancelled", group.number, age)
            if group.rank == BOARD and self.board is not None:
                self.board.withdraw(group.number, group.try_number)
            else:
                self.post.send(group.rank, Cancel(group.number, group.try_number))
            self._stop_running(group)
            self.admission.reject()
            self.table.remove(group.number)
            self.counts["dropped"] += 1
            self._issue_again(group, group.try_number + 1)

    def flush(self, version: int, want: int | None = None) -> None:
        """Asks for open shards that would complete the batch."""
        for rank in self.table.ranks_to_flush(version, want):
            self.post.send(rank, Flush())

    def replace_shard(self, shard: str) -> None:
        """A shard cannot be read: its groups are issued again (same try: a recovery, not a new draw), those that wait
        on the shelf when their turn comes."""
        self.shelf.drop_shard(shard)
        for group in self.table.in_shard(shard):
            self.table.remove(group.number)
            self.admission.give_back()
            self.counts["damaged"] += 1
            self.reissues.append((group.number, group.example, group.try_number))

    def consume(self, batch: Sequence[OutstandingGroup]) -> Losses:
        """The step on these groups is done: they are closed, the version moves; returns losses since the last one."""
        for group in batch:
            self.table.remove(group.number)
            self.cursor.close(group.number, "consumed")
        num_consumed = len(batch) + self.table.use_dropped(self.admission.batch - len(batch))
        if num_consumed < self.admission.batch:
            self.admission.consume_short(num_consumed)
        self.admission.version += 1
        self.resampled = 0
        self.shelf.drop_useless(self.admission.version, self.cursor.is_closed)
        if self.resumed_at is not None:
            self._tell_of_resume(self.resumed_at)
            self.resumed_at = None
        return self.take_losses()

    def _tell_of_resume(self, version: int) -> None:
        logger.info(
            "since the start from version %d: %d groups of earlier shards adopted, %d issued again, %d on the shelf "
            "(totals of the run, but the last)",
            version, self.counts["adopted"], self.counts["issued_again"], len(self.shelf),
        )  # fmt: skip

    def take_losses(self) -> Losses:
        """Groups that ended without being trained on since this was asked last."""
        losses, self.losses = self.losses, Losses()
        return losses

    def want(self) -> int:
        """Groups in the next batch: `batch`, or what is left when the data ends."""
        if self.data_is_exhausted and not self.reissues:
            return min(self.admission.batch, len(self.table.groups) + len(self.table.dropped))
        return self.admission.batch

    def _issue_again(self, group: OutstandingGroup, try_number: int) -> None:
        if try_number > self.config.rollout.max_reissues:
            self.counts["skipped"] += 1
            self._lose(group, "skipped", f"{try_number} tries failed")
        else:
            self.reissues.append((group.number, group.example, try_number))

    def _lose(self, group: OutstandingGroup, how: str, reason: str) -> None:
        self.cursor.close(group.number, how)
        losses = self.losses.filtered if how == "filtered" else self.losses.skipped
        losses.append(Loss(group.number, group.try_number, reason))

    def _stop_running(self, group: OutstandingGroup) -> None:
        if group.rank == BOARD:
            self.on_board -= 1
        else:
            self.ranks.add(group.rank, -1)
