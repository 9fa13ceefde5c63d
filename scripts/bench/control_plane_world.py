"""One head against a thousand rollout ranks that a few processes play: `python control_plane_world.py SETTINGS`.

head (rank 0)          the real World, PostOffice, Pump, Dispatcher, GroupTable, Admission, Cursor and Pulse;
                       training takes no time
sender (rank 1, 2, …)  answers for its share of the virtual ranks as fast as it can (`control_plane_players.py`)
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from control_plane_players import (
    Go,
    Layout,
    Player,
    Settings,
    VirtualAssign,
    VirtualCancel,
    VirtualFinished,
    VirtualFlush,
    VirtualPost,
    VirtualPublished,
    VirtualRejected,
)

from pekoe.launch.node_leaders import duties_of
from pekoe.launch.world import World
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.admission import Admission
from pekoe.pipeline.control.disk_watch import DiskWatch
from pekoe.pipeline.control.dispatcher import Dispatcher
from pekoe.pipeline.control.group_table import OutstandingGroup
from pekoe.pipeline.control.pump import Pump
from pekoe.pipeline.data.cursor import Cursor
from pekoe.pipeline.messages import Inbox, Message


class CheckedAdmission(Admission):
    """Checks at each admission that the bound holds, by groups that it counts in the table and not in its counters."""

    outstanding: Callable[[], int]
    consumed = 0
    num_checked = 0
    num_violations = 0
    highest_share = 0.0

    def admit(self) -> None:
        super().admit()
        assert self.eta is not None
        started, allowed = self.consumed + self.outstanding() + 1, (self.eta + self.version + 1) * self.batch
        self.num_checked += 1
        self.num_violations += started > allowed or self.running > self.max_concurrent
        self.highest_share = max(self.highest_share, started / allowed)


@dataclass
class Head:
    """The control loop of a run whose training takes no time."""

    world: World
    layout: Layout
    dispatcher: Dispatcher
    admission: CheckedAdmission
    pump: Pump
    counts: Counter[str] = field(default_factory=Counter)
    staleness: int = 0
    steps: int = 0
    longest_inbox: int = 0
    rss: list[int] = field(default_factory=list)

    def handlers(self) -> dict[type[Message], Callable[[int, Any], None]]:
        dispatcher, counts = self.dispatcher, self.counts

        def finished(_: int, message: VirtualFinished) -> None:
            counts["finished"] += 1
            dispatcher.on_finished(message, message.source)

        def published(_: int, message: VirtualPublished) -> None:
            counts["published"] += 1
            dispatcher.on_published(message)

        def rejected(_: int, message: VirtualRejected) -> None:
            counts["rejected"] += 1
            dispatcher.on_rejected(message)

        return {VirtualFinished: finished, VirtualPublished: published, VirtualRejected: rejected}

    def gather(self) -> list[OutstandingGroup]:
        """As the controller does it."""
        dispatcher, version, began = self.dispatcher, self.admission.version, time.monotonic()

        def complete() -> list[OutstandingGroup] | None:
            self.longest_inbox = max(self.longest_inbox, self.pump.inbox.qsize())
            want = dispatcher.want()
            dispatcher.drop_stale(version, time.monotonic() - began)
            chosen = dispatcher.table.choose(version, want)
            if chosen is None:
                dispatcher.flush(version, want)
            return chosen

        return self.pump.wait(complete, f"the batch of version {version}", on=dispatcher.table.busy_ranks)

    def step(self) -> None:
        batch = self.gather()
        self.staleness = max(self.staleness, *(self.admission.version - group.admitted_version for group in batch))
        self.admission.consumed += len(batch)
        self.dispatcher.consume(batch)
        self.dispatcher.take_idle_shards()
        self.steps += 1
        self.rss.append(psutil.Process().memory_info().rss)

    def run(self, seconds: float) -> dict[str, float]:
        """Steps for about so long, after one to warm up."""
        self.step()
        before, began, cpu = sum(self.counts.values()), time.monotonic(), cpu_seconds()
        thread = time.thread_time()
        while time.monotonic() - began < seconds:
            self.step()
        lasted = time.monotonic() - began
        notices = sum(self.counts.values()) - before
        return {
            "notices": notices, "seconds": lasted, "cpu_seconds": cpu_seconds() - cpu,
            "control_seconds": time.thread_time() - thread,
        }  # fmt: skip


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def lead(world: World, layout: Layout, bare: float, done: threading.Event, inbox: Inbox) -> None:
    """The head's control thread; prints the figures."""
    settings = layout.settings
    config = RunConfig()
    config.rollout.max_head_offpolicyness, config.train_dataset.batch_size = settings.eta, settings.batch
    config.gconfig.n_samples = settings.n_samples
    dispatcher = Dispatcher(config, VirtualPost(world, layout), Cursor(1 << 16, 1, epochs=None), layout.ranks, 1 << 30)
    limits = dispatcher.admission
    admission = CheckedAdmission(limits.max_concurrent, limits.batch, limits.eta)

    def set_phase(phase: str, limit: float | None = None, on: Sequence[int] = (), moved: float | None = None) -> None:
        world.set_thread_phase("controller", phase, limit, on, moved)

    admission.outstanding = lambda: len(dispatcher.table.groups)
    dispatcher.admission = admission
    pump = Pump(
        inbox, set_phase, lambda: "", lambda ranks: {}, dispatcher.admit_all, DiskWatch(60.0), 60.0, lambda: False
    )
    head = Head(world, layout, dispatcher, admission, pump)
    pump.handlers.update(head.handlers())
    for player in range(1, world.size):
        world.post.send(player, Go(0))
    measured = head.run(settings.seconds)
    heard = world._pulse
    now = time.monotonic()
    ages = [now - heard._heard[rank] for rank in layout.ranks if rank in heard.newest]
    quarter = head.rss[len(head.rss) // 4]
    print(json.dumps({
        **measured, "bare_per_second": bare, "steps": head.steps, "counts": dict(head.counts),
        "admissions": admission.num_checked, "violations": admission.num_violations,
        "highest_share": admission.highest_share, "staleness": head.staleness,
        "longest_inbox": head.longest_inbox, "rss_bytes": head.rss[-1], "rss_growth_bytes": head.rss[-1] - quarter,
        "ranks_heard": len(ages), "oldest_heartbeat_seconds": max(ages, default=-1.0),
    }), flush=True)  # fmt: skip
    for player in range(1, world.size):
        world.post.send(player, Go(-1))
    done.set()


def take_bare(world: World, settings: Settings, inbox: Inbox) -> float:
    """The baseline: a post office loop that only receives; notices per second. Main thread."""
    wanted, count = settings.bare_notices * (world.size - 1), 0
    for player in range(1, world.size):
        world.post.send(player, Go(settings.bare_notices))
    began = 0.0
    while count < wanted:
        if not world.pump():
            time.sleep(5e-5)
        while not inbox.empty():
            inbox.get()
            began = began or time.monotonic()
            count += 1
    return wanted / (time.monotonic() - began)


def widen(world: World, layout: Layout, hosts: Sequence[str]) -> None:
    """The head's pulse judges the leaders of the virtual nodes too."""
    world.hosts = (*world.hosts, *hosts)
    world._pulse.duties = duties_of(0, world.hosts)
    world._pulse.listen_from_now()


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    done = threading.Event()
    size = int(os.environ["PMI_SIZE"])
    with World.join(size) as world:
        layout = Layout(world.size, settings)
        if world.rank == 0:
            inbox = world.post.inbox(VirtualFinished, VirtualPublished, VirtualRejected)
            bare = take_bare(world, settings, inbox)
            widen(world, layout, [f"virtual-{layout.writer_of(rank)}" for rank in layout.ranks])
            world.start("controller", lambda: lead(world, layout, bare, done, inbox))
        else:
            inbox = world.post.inbox(VirtualAssign, VirtualFlush, VirtualCancel, Go)
            player = Player(world, layout, inbox)
            world.start("player", lambda: player.run(done))
        world.serve(done)
        world.finalize()


if __name__ == "__main__":
    main()
