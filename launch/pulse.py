"""Heartbeats: who sends them, who watches whom, who writes them to disk.

Every rank tells the head and its node's leader (the lowest rank on the host), which writes the files. The head watches
all ranks and rank 1 watches the head: a main thread that stands still (SIGSTOP, a call that never returns the
interpreter's lock) is noticed after `silence_seconds`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from pekoe.launch.heartbeat_files import HeartbeatFiles
from pekoe.launch.rank_log import log_path
from pekoe.pipeline.messages import Heartbeat, ThreadPhase
from pekoe.pipeline.observe.stack_request import write_answer
from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    from pekoe.launch.world import World

logger = logging.getLogger(__name__)


OWN_PAUSE_SECONDS = 5.0
"""A main thread looks for silence about every second; one that came so late was at least held up itself."""
DUMP_SHARE = 0.75
"""A main thread that has stood still for this share of `silence_seconds` has its stacks written into the log."""


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
        """The last heartbeat of each rank heard here (all of them on the head)."""
        self._heard: dict[int, float] = {}
        self._inbox = world.post.inbox(Heartbeat)
        self._counter = 0
        self._next_beat = 0.0
        self._next_check = time.monotonic() + 1.0
        self._looked = time.monotonic()
        self._files: HeartbeatFiles | None = None
        leader = world.hosts.index(world.hosts[world.rank])
        self._listeners = {0, leader}
        if world.rank == 0 and world.size > 1:
            self._listeners.add(1)
        self._leads = leader == world.rank
        self.listen_from_now()

    def listen_from_now(self) -> None:
        """Silence counts from here: before `serve` nobody sends."""
        now = time.monotonic()
        if self.world.rank == 0:
            self._heard = dict.fromkeys(range(1, self.world.size), now)
        elif self.world.rank == 1:
            self._heard = {0: now}

    def open_files(self, run: RunDirectory, attempt: int) -> None:
        if self._leads:
            self._files = HeartbeatFiles(run, attempt, self._answer_request)

    def close(self) -> None:
        """The orderly end of all ranks: their last heartbeats on disk say so."""
        faulthandler.cancel_dump_traceback_later()
        if self._files is not None:
            for heartbeat in self.newest.values():
                if heartbeat.host == self.world.facts.host:
                    self._files.put(msgspec.structs.replace(heartbeat, phase="ended", phase_seconds=0.0, threads=()))
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
        while not self._inbox.empty():
            source, message = self._inbox.get()
            if isinstance(message, Heartbeat):
                self.newest[source] = message
                self._heard[source] = now
                if self._files is not None and self.world.hosts[source] == self.world.hosts[self.world.rank]:
                    self._files.put(message)
        if now >= self._next_check:
            self._next_check = now + 1.0
            self._look_for_silence(now)
            self.world.run_checks()

    def send(self) -> None:
        """One heartbeat now."""
        world, state = self.world, self.world.state
        self._counter += 1
        heartbeat = Heartbeat(
            rank=world.rank, role=state.role, host=state.host, pid=os.getpid(), counter=self._counter,
            phase=state.phase, phase_seconds=round(time.monotonic() - state.phase_since, 3), version=world.version,
            gauges=self._gauges(), threads=self._threads(), ends_at=world.ends_at,
        )  # fmt: skip
        faulthandler.dump_traceback_later(world.settings.silence_seconds * DUMP_SHARE, file=2)
        for listener in self._listeners:
            world.post.send(listener, heartbeat)

    def _answer_request(self, request: str) -> None:
        """The leader of a node, in a thread of its own: what the ranks of this node are doing goes to files."""
        world, run = self.world, self.world.state.run
        if run is None:
            return
        here = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
        try:
            for rank, text in world.stacks_of(here).items():
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

    def _look_for_silence(self, now: float) -> None:
        """A rank that has stood still itself blames nobody for what it did not hear meanwhile."""
        limit = self.world.settings.silence_seconds
        stood_still, self._looked = now - self._looked, now
        if stood_still > max(limit / 2, OWN_PAUSE_SECONDS):
            self._heard = dict.fromkeys(self._heard, now)
        for rank, heard in self._heard.items():
            if now - heard > limit and rank != self.world.rank:
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
