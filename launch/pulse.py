"""Heartbeats: sent, gathered, judged and written to disk.

Every rank tells its node's leader, which tells the head in one message for all of its node and writes the node's file
(`launch/node_leaders.py` says who tells and judges whom). A main thread that stands still (SIGSTOP, a call that never
returns the interpreter's lock) is noticed after `silence_seconds`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from pekoe.launch.heartbeat_files import HeartbeatFiles, seconds_between_writes
from pekoe.launch.node_leaders import duties_of
from pekoe.launch.rank_log import log_path
from pekoe.pipeline.messages import HeardRank, Heartbeat, NodeHeartbeats, ThreadPhase
from pekoe.pipeline.observe.stack_request import write_answer
from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    from pekoe.launch.world import World

logger = logging.getLogger(__name__)


LOOK_SECONDS = 1.0
"""Between two looks for silence."""
LATE_SECONDS = 0.5
"""A look that comes so much later: this main thread, if not the whole machine, stood still meanwhile."""
OWN_PAUSE_SECONDS = 5.0
"""One that was held up for so long, and for half of `silence_seconds`, begins anew."""
DUMP_SHARE = 0.75
"""A main thread that has stood still for this share of `silence_seconds` has its stacks written into the log."""
DEPUTY_SHARE = 0.25
"""Of `silence_seconds`: a leader that said nothing for so long is stood in for by its node's deputy."""
RANKS_PER_MESSAGE = 256
PHASE_LENGTH = 200
"""Of a heartbeat within a bundle: keeps it far below the limit of a control message."""


class SilentRankError(RuntimeError):
    """A rank's main thread has stopped sending heartbeats."""

    def __init__(self, text: str, stacks: Mapping[int, str]) -> None:
        super().__init__(text)
        self.stacks = dict(stacks)
        self.ranks = tuple(stacks)


class Pulse:
    """One per world and rank; driven by the main thread."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.newest: dict[int, Heartbeat] = {}
        """The last heartbeat of each rank heard here (all of them on the head, those of other nodes in short)."""
        self.duties = duties_of(world.rank, world.hosts)
        self._heard: dict[int, float] = {}
        self._spared: dict[int, float] = {}
        """When (monotonic seconds)."""
        self._inbox = world.post.inbox(Heartbeat, NodeHeartbeats)
        self._counter = 0
        self._next_beat = 0.0
        self._next_check = time.monotonic() + LOOK_SECONDS
        self._looked = time.monotonic()
        self._files: HeartbeatFiles | None = None
        self._stands_in = False
        self.listen_from_now()

    def listen_from_now(self) -> None:
        """Silence counts from here: before `serve` nobody sends."""
        now = time.monotonic()
        self._heard |= dict.fromkeys(self.duties.judged, now)
        if self.duties.is_deputy:
            self._heard[self.duties.leader] = now

    def open_files(self, run: RunDirectory, attempt: int) -> None:
        if self.duties.is_leader:
            pause = seconds_between_writes(self.world.settings.heartbeat_seconds, self.world.num_hosts)
            self._files = HeartbeatFiles(run, attempt, self.world.facts.host, pause, self._answer_request)

    def close(self) -> None:
        """The orderly end of all ranks: their last heartbeats on disk say so."""
        faulthandler.cancel_dump_traceback_later()
        if self._files is None:
            return
        self._take(time.monotonic())
        for rank in self.duties.members:
            never_heard = Heartbeat(rank, "", self.world.hosts[rank], self.world.pids[rank], 0, "", 0.0, -1)
            last = self.newest.get(rank, never_heard)
            self._files.put(msgspec.structs.replace(last, phase="ended", phase_seconds=0.0, threads=()))
        self._files.close()

    def phases(self, ranks: list[int]) -> str:
        """For error texts: what these ranks said last."""
        heartbeats = {rank: self.newest.get(rank) for rank in ranks}
        return ", ".join(f"rank {rank}: {h.phase if h else 'never heard'}" for rank, h in heartbeats.items())

    def last_words(self, rank: int) -> str:
        """When a rank was heard last, and what it did then."""
        last, heard = self.newest.get(rank), self._heard.get(rank)
        if last is None or heard is None:
            return "this rank hears no heartbeats of it"
        return f"last heartbeat {time.monotonic() - heard:.0f} s ago, in phase {last.phase!r}"

    def beat(self, now: float) -> None:
        """Sends when it is time, takes what came, looks for silence. SilentRankError names the silent rank."""
        if now >= self._next_beat:
            self._next_beat = now + self.world.settings.heartbeat_seconds
            self.send()
        self._take(now)
        if now >= self._next_check:
            self._next_check = now + LOOK_SECONDS
            self._look_for_silence(now)
            self.world.run_checks()

    def _take(self, now: float) -> None:
        while not self._inbox.empty():
            _, message = self._inbox.get()
            if isinstance(message, Heartbeat):
                self.hear(message, now)
            elif isinstance(message, NodeHeartbeats):
                for heard in message.ranks:
                    self.hear(heard.heartbeat, now - heard.seconds)

    def hear(self, heartbeat: Heartbeat, when: float) -> None:
        """Takes note of a rank; a leader writes what its own node says."""
        rank, last = heartbeat.rank, self.newest.get(heartbeat.rank)
        if last is not None and heartbeat.counter < last.counter:
            return
        self.newest[rank], self._heard[rank] = heartbeat, max(when, self._heard.get(rank, when))
        self._spared.pop(rank, None)
        if self._files is not None and rank in self.duties.members:
            self._files.put(heartbeat)

    def send(self) -> None:
        """One heartbeat now, and what this rank tells the head of its node."""
        world, state = self.world, self.world.state
        self._counter += 1
        heartbeat = Heartbeat(
            rank=world.rank, role=state.role, host=state.host, pid=os.getpid(), counter=self._counter,
            phase=state.phase, phase_seconds=round(time.monotonic() - state.phase_since, 3), version=world.version,
            gauges=self._gauges(), threads=self._threads(), ends_at=world.ends_at,
        )  # fmt: skip
        faulthandler.dump_traceback_later(world.settings.silence_seconds * DUMP_SHARE, file=2)
        for listener in self.duties.listeners:
            if listener == world.rank:
                self.hear(heartbeat, time.monotonic())
            else:
                world.post.send(listener, heartbeat)
        if world.rank != 0 and (self.duties.is_leader or self._leader_is_silent()):
            self._tell_head()

    def _tell_head(self) -> None:
        """Everybody of this node who was heard here, in short; a deputy says nothing of the leader."""
        now = time.monotonic()
        told = [rank for rank in self.duties.members if rank in self.newest and self._may_tell_of(rank)]
        for start in range(0, len(told), RANKS_PER_MESSAGE):
            ranks = told[start : start + RANKS_PER_MESSAGE]
            heard = tuple(HeardRank(_short(self.newest[rank]), now - self._heard[rank]) for rank in ranks)
            self.world.post.send(0, NodeHeartbeats(heard))

    def _may_tell_of(self, rank: int) -> bool:
        return rank != self.duties.leader or self.duties.is_leader

    def _leader_is_silent(self) -> bool:
        """As this rank, its deputy, has heard."""
        duties = self.duties
        if not duties.is_deputy:
            return False
        silent = time.monotonic() - self._heard[duties.leader] > self.world.settings.silence_seconds * DEPUTY_SHARE
        if silent and not self._stands_in:
            logger.warning(
                "rank %d, which leads this node, is silent (%s): this rank tells the head of its node",
                duties.leader, self.last_words(duties.leader),
            )  # fmt: skip
        self._stands_in = silent
        return silent

    def _answer_request(self, request: str) -> None:
        """The leader of a node, in a thread of its own: what the ranks of this node are doing goes to files."""
        world, run = self.world, self.world.state.run
        if run is None:
            return
        try:
            for rank, text in world.stacks_of(self.duties.members).items():
                write_answer(run, world.attempt, rank, request, text)
        except OSError:
            logger.exception("the stacks that were asked for cannot be written")

    def _gauges(self) -> dict[str, float]:
        """What the roles measure, and the share of their threads' time that went into waits."""
        shares = self.world.state.threads.waiting_shares()
        gauges = self.world.gauges() if self.world.gauges is not None else {}
        return {**gauges, **{f"{who}/waiting_share": round(share, 4) for who, share in shares.items()}}

    def _threads(self) -> tuple[ThreadPhase, ...]:
        """What the threads say, then those that are watched and say nothing, or do not get on."""
        told = self.world.state.threads.now()
        names = {thread.who for thread in told}
        watched = [w.phase() for w in self.world.watches if w.who not in names or w.stalled_seconds > w.limit / 4]
        return (*told, *watched)

    @property
    def _longest_pause(self) -> float:
        return max(self.world.settings.silence_seconds / 2, OWN_PAUSE_SECONDS)

    def _spare(self, late: float, now: float) -> None:
        """Time in which this rank did not look is no silence; of a rank that stays unheard, no more than one pause in
        all: one that is dead must be found by a rank whose every look is late, too."""
        for rank, heard in self._heard.items():
            spared = self._spared.get(rank, 0.0)
            more = min(late, self._longest_pause - spared)
            self._heard[rank], self._spared[rank] = min(now, heard + more), spared + more

    def _look_for_silence(self, now: float) -> None:
        """A rank that has stood still itself blames nobody for what it did not hear meanwhile."""
        limit = self.world.settings.silence_seconds
        stood_still, self._looked = now - self._looked, now
        if stood_still > self._longest_pause:
            self._heard = dict.fromkeys(self._heard, now)
        elif (late := stood_still - LOOK_SECONDS) > LATE_SECONDS:
            self._spare(late, now)
        if self.duties.is_deputy and not self._stands_in:
            return
        for rank in self.duties.judged:
            heard = self._heard[rank]
            if now - heard > limit:
                last = self.newest.get(rank)
                log = self._log_of(rank)
                raise SilentRankError(
                    f"rank {rank} ({last.role if last else 'no role yet'}, {self.world.hosts[rank]}) has sent no "
                    f"heartbeat for {now - heard:.0f} s; its last phase was {last.phase if last else 'never heard'!r} "
                    f"(cluster.silence_seconds is {limit}){log}",
                    self.world.stacks_of([rank]),
                )

    def _log_of(self, rank: int) -> str:
        """Where a main thread that stands still has its stacks written in time, if it was not stopped altogether."""
        run = self.world.state.run
        return "" if run is None else f"; see {run.relative(log_path(run, self.world.attempt, rank))}"


def _short(heartbeat: Heartbeat) -> Heartbeat:
    return msgspec.structs.replace(heartbeat, phase=heartbeat.phase[:PHASE_LENGTH], gauges={}, threads=())
