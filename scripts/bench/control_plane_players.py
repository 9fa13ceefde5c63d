"""A thousand virtual rollout ranks, played by a few processes: who they are, their messages, their answers.

Virtual ranks follow the real ones in number. They lie on nodes with one writer each: it says Finished for all of its
node and publishes a shard when it is full or flushed. Virtual ids travel inside the messages.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

from pekoe.launch.world import World
from pekoe.pipeline.messages import (
    Assign,
    Cancel,
    Finished,
    Flush,
    HeardRank,
    Heartbeat,
    Inbox,
    Message,
    NodeHeartbeats,
    Published,
    PublishedGroup,
    Rejected,
    Row,
)


@dataclass(frozen=True)
class Settings:
    """Of one measurement."""

    num_virtual: int = 1000
    ranks_per_node: int = 8
    shard_groups: int = 8
    """Groups of a full shard; 1 makes a notice of each."""
    batch: int = 1024
    eta: int = 2
    n_samples: int = 8
    seconds: float = 10.0
    bare_notices: int = 20_000
    """Of each sender, for the baseline."""
    heartbeat_seconds: float = 2.0
    rejected_share: float = 0.02


class VirtualAssign(Assign, frozen=True):
    rank: int = -1


class VirtualFlush(Flush, frozen=True):
    rank: int = -1


class VirtualCancel(Cancel, frozen=True):
    rank: int = -1


class VirtualFinished(Finished, frozen=True):
    source: int = -1


class VirtualPublished(Published, frozen=True):
    source: int = -1


class VirtualRejected(Rejected, frozen=True):
    source: int = -1


class Go(Message, frozen=True):
    """To senders: send the notices of the baseline, or begin to answer (0); -1: leave."""

    bare_notices: int


@dataclass(frozen=True)
class Layout:
    """Which virtual ranks there are, and who plays them."""

    num_real: int
    settings: Settings

    @property
    def ranks(self) -> range:
        return range(self.num_real, self.num_real + self.settings.num_virtual)

    def node_of(self, rank: int) -> int:
        return (rank - self.num_real) // self.settings.ranks_per_node

    def writer_of(self, rank: int) -> int:
        return self.num_real + self.node_of(rank) * self.settings.ranks_per_node

    def player_of(self, rank: int) -> int:
        return 1 + self.node_of(rank) % (self.num_real - 1)

    def nodes_of(self, player: int) -> dict[int, list[int]]:
        """Virtual ranks by writer."""
        found: dict[int, list[int]] = defaultdict(list)
        for rank in self.ranks:
            if self.player_of(rank) == player:
                found[self.writer_of(rank)].append(rank)
        return found


class VirtualPost:
    """The head's post: what goes to a virtual rank goes to its player."""

    rank = 0
    kinds: ClassVar[dict[type[Message], type[Message]]] = {
        Assign: VirtualAssign, Flush: VirtualFlush, Cancel: VirtualCancel,
    }  # fmt: skip

    def __init__(self, world: World, layout: Layout) -> None:
        self._world, self._layout = world, layout
        self.size = world.size + layout.settings.num_virtual

    def send(self, to: int, message: Message) -> None:
        values = [getattr(message, name) for name in message.__struct_fields__]
        self._world.post.send(self._layout.player_of(to), self.kinds[type(message)](*values, rank=to))

    def inbox(self, *kinds: type[Message]) -> Inbox:
        return self._world.post.inbox(*kinds)


@dataclass
class Player:
    """Answers for its share of the virtual ranks."""

    world: World
    layout: Layout
    inbox: Inbox
    open_shards: dict[int, list[Assign]] = field(default_factory=lambda: defaultdict(list))
    num_shards: int = 0

    def __post_init__(self) -> None:
        settings = self.layout.settings
        self.rows = tuple(Row(n, n, 1000, 800, 0.5, 0, 0, False) for n in range(settings.n_samples))
        self.rejects = int(1 / settings.rejected_share) if settings.rejected_share else 0
        self.ends = threading.Event()

    def run(self, done: threading.Event) -> None:
        number = 0
        while True:
            try:
                _, message = self.inbox.get(timeout=0.5)
            except queue.Empty:
                continue
            if isinstance(message, VirtualAssign):
                number += 1
                self.answer(message, number)
            elif isinstance(message, VirtualFlush):
                self.publish(message.rank)
            elif isinstance(message, Go) and message.bare_notices < 0:
                self.ends.set()
                done.set()
                return
            elif isinstance(message, Go) and message.bare_notices > 0:
                self.send_bare(message.bare_notices)
            elif isinstance(message, Go):
                self.world.start("heart", self.beat)

    def answer(self, assign: VirtualAssign, number: int) -> None:
        if self.rejects and number % self.rejects == 0:
            self.world.post.send(0, VirtualRejected(assign.group, assign.try_number, "none", source=assign.rank))
            return
        writer = self.layout.writer_of(assign.rank)
        self.world.post.send(0, VirtualFinished(assign.group, assign.try_number, writer))
        self.open_shards[writer].append(assign)
        if len(self.open_shards[writer]) >= self.layout.settings.shard_groups:
            self.publish(writer)

    def publish(self, writer: int) -> None:
        groups = self.open_shards.pop(writer, [])
        if groups:
            self.num_shards += 1
            path = f"shards/0-rank-{writer}/{self.num_shards:06d}.h5"
            published = tuple(PublishedGroup(one.group, one.try_number, self.rows) for one in groups)
            self.world.post.send(0, VirtualPublished(path, published, source=writer))

    def send_bare(self, count: int) -> None:
        """The same mix as in the measurement: a shard's notice after its groups' notices."""
        size = self.layout.settings.shard_groups
        for number in range(count):
            if number % (size + 1) < size:
                self.world.post.send(0, VirtualFinished(number, 0, self.world.rank))
            else:
                published = tuple(PublishedGroup(number, 0, self.rows) for _ in range(size))
                self.world.post.send(0, VirtualPublished("shards/0-rank-1/000000.h5", published, self.world.rank))

    def beat(self) -> None:
        """A bundle of each node per interval, as its leader sends it."""
        nodes = self.layout.nodes_of(self.world.rank)
        counter = 0
        while not self.ends.wait(self.layout.settings.heartbeat_seconds):
            counter += 1
            for writer, ranks in nodes.items():
                self.world.post.send(0, NodeHeartbeats(tuple(self.heard(rank, writer, counter) for rank in ranks)))

    def heard(self, rank: int, writer: int, counter: int) -> HeardRank:
        phase = "rollout: rollout; engine: decoding; executor: waiting for tokens"
        return HeardRank(Heartbeat(rank, "rollout", f"virtual-{writer}", 1, counter, phase, 1.0, 3), 0.1)
