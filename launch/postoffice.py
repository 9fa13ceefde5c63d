"""The post office: typed messages between ranks over MPI, on a communicator of its own.

    any thread ── send ──► outbox ──(main thread: Isend)──► peer ──(main thread: probe, receive)──► inbox ──► any thread

Only the main thread calls MPI, in `pump`. Buffers of unfinished sends are kept. An outbox that grows over its bound is
an error naming the peer; a message over the size limit is an error before any call. Order is kept per source and
destination. A kind nobody has asked for yet is held, within a bound, until its inbox is opened.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import msgspec.msgpack
from mpi4py import MPI

from pekoe.pipeline.messages import Inbox, Message

MAX_MESSAGE_BYTES = 1 << 20
TAG = 1
MAX_PER_PUMP = 512
"""Messages taken in one turn, so that the main thread gets to its other duties."""


MAX_IN_FLIGHT = 64
"""Sends handed to MPI per peer; the rest waits here, so that a peer that stands still costs the others nothing."""


class OutboxFullError(RuntimeError):
    """A peer does not take its messages."""


class MessageTooLargeError(ValueError):
    """A message is over the limit: bulk data does not belong here."""


class UnopenedInboxError(RuntimeError):
    """Too many messages of a kind that nobody on this rank has asked for."""


@dataclass(frozen=True)
class PostLimits:
    """Bounds of a post office."""

    message_bytes: int = MAX_MESSAGE_BYTES
    outbox_messages: int = 100_000
    """Per peer, not yet taken by MPI."""
    outbox_bytes: int = 256 << 20
    """Per peer."""
    held_messages: int = 100_000
    """Received, of kinds without an inbox."""


def message_kinds(root: type[Message] = Message) -> list[type[Message]]:
    """All message types defined so far, by their tags. ValueError when two share a name."""
    kinds: dict[str, type[Message]] = {}
    waiting = list(root.__subclasses__())
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kinds.setdefault(kind.__name__, kind) is not kind:
            raise ValueError(
                f"message {kind.__name__}: defined twice, in {kinds[kind.__name__].__module__} and {kind.__module__}"
            )
    return [kinds[name] for name in sorted(kinds)]


@dataclass
class _Lane:
    """What is on its way to one peer."""

    waiting: deque[bytes] = field(default_factory=deque)
    in_flight: deque[tuple[bytes, MPI.Request]] = field(default_factory=deque)
    messages: int = 0
    size: int = 0
    """Bytes of all of them."""


class PostOffice:
    """Implements `pekoe.pipeline.messages.Post`. `send` and `inbox` from any thread; `pump` from the main thread alone.

    Message types must be defined before the post office is made.
    """

    def __init__(self, communicator: MPI.Intracomm, limits: PostLimits | None = None) -> None:
        self._communicator = communicator.Dup()
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self.limits = limits or PostLimits()
        self.wake = threading.Event()
        """Set when something waits to be sent: ends the main thread's pause."""
        self._kinds = message_kinds()
        self._encoder = msgspec.msgpack.Encoder()
        union: type[Message] = self._kinds[0]
        for kind in self._kinds[1:]:
            union |= kind  # type: ignore[assignment]
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        self._lock = threading.Lock()
        self._lanes = [_Lane() for _ in range(self.size)]
        self._busy: set[int] = set()
        """Peers with anything waiting or in flight."""
        self._inboxes: dict[type[Message], Inbox] = {}
        self._held: deque[tuple[int, Message]] = deque()
        self._status = MPI.Status()

    def send(self, to: int, message: Message) -> None:
        """Queues a message and returns at once. ValueError for a rank that is not there, MessageTooLargeError,
        OutboxFullError."""
        if not 0 <= to < self.size:
            raise ValueError(
                f"send {type(message).__name__}: rank {to} is not in the world; allowed: 0 to {self.size - 1}"
            )
        data = self._encoder.encode(message)
        if len(data) > self.limits.message_bytes:
            raise MessageTooLargeError(
                f"message {type(message).__name__} to rank {to} has {len(data)} bytes; allowed: at most "
                f"{self.limits.message_bytes}: bulk data travels by files or collectives"
            )
        if to == self.rank:
            self._deliver(self.rank, self._decoder.decode(data))
            return
        lane = self._lanes[to]
        with self._lock:
            if lane.messages >= self.limits.outbox_messages or lane.size + len(data) > self.limits.outbox_bytes:
                raise OutboxFullError(
                    f"rank {to} does not take its messages: {lane.messages} of them ({lane.size} bytes) wait on rank "
                    f"{self.rank}; allowed: {self.limits.outbox_messages} or {self.limits.outbox_bytes} bytes"
                )
            lane.messages += 1
            lane.size += len(data)
            lane.waiting.append(data)
            self._busy.add(to)
        self.wake.set()

    def inbox(self, *kinds: type[Message]) -> Inbox:
        """A queue for these kinds, with what was held for them. ValueError if one has an inbox already or is no
        message."""
        box: Inbox = queue.SimpleQueue()
        with self._lock:
            for kind in kinds:
                if kind not in self._kinds:
                    raise ValueError(
                        f"inbox: {kind.__name__} was not defined as a message when the post office was made"
                    )
                if kind in self._inboxes:
                    raise ValueError(
                        f"inbox: {kind.__name__} has an inbox on rank {self.rank} already; allowed: one per kind"
                    )
            self._inboxes.update(dict.fromkeys(kinds, box))
            held, self._held = self._held, deque()
            for source, message in held:
                if type(message) in kinds:
                    box.put((source, message))
                else:
                    self._held.append((source, message))
        return box

    @property
    def num_unsent(self) -> int:
        """Messages that MPI has not finished sending."""
        with self._lock:
            return sum(self._lanes[to].messages for to in self._busy)

    def pump(self) -> bool:
        """One turn: starts waiting sends, finishes old ones, takes what has arrived. True if anything moved. Main
        thread only."""
        self.wake.clear()
        with self._lock:
            busy = list(self._busy)
        moved = False
        for to in busy:
            moved |= self._move(to, self._lanes[to])
        return self._receive() or moved

    def drain(self, seconds: float) -> None:
        """Pumps until everything is sent. TimeoutError naming the peers that did not take theirs. Main thread only."""
        deadline = time.monotonic() + seconds
        while self.num_unsent:
            if not self.pump():
                time.sleep(0.001)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self.rank}: ranks {sorted(self._busy)} did not take {self.num_unsent} messages "
                    f"in {seconds:.1f} s"
                )

    def part(self, seconds: float) -> None:
        """The end, by all ranks together: everybody has sent what waits, and goes on taking until all have.
        TimeoutError as in `drain`; ranks that come later than so many seconds are not waited for. Main thread only.

        Without it a large message to a rank that has gone already would never be over.
        """
        self.drain(seconds)
        deadline, all_have_sent = time.monotonic() + seconds, self._communicator.Ibarrier()
        while not all_have_sent.Test() and time.monotonic() < deadline:
            if not self.pump():
                time.sleep(0.0005)
        self.pump()

    def close(self) -> None:
        """Gives the communicator back (collective)."""
        self._communicator.Free()

    def _move(self, to: int, lane: _Lane) -> bool:
        """Finishes old sends of a lane and starts new ones; True if anything moved."""
        moved = False
        while lane.in_flight and lane.in_flight[0][1].Test():
            self._account(to, lane, lane.in_flight.popleft()[0])
            moved = True
        while lane.waiting and len(lane.in_flight) < MAX_IN_FLIGHT:
            data = lane.waiting.popleft()
            request = self._communicator.Isend([data, MPI.BYTE], to, TAG)
            moved = True
            if not lane.in_flight and request.Test():
                self._account(to, lane, data)
            else:
                lane.in_flight.append((data, request))
        return moved

    def _account(self, to: int, lane: _Lane, data: bytes) -> None:
        with self._lock:
            lane.messages -= 1
            lane.size -= len(data)
            if not lane.messages:
                self._busy.discard(to)

    def _receive(self) -> bool:
        status = self._status
        for count in range(MAX_PER_PUMP):
            letter = self._communicator.Improbe(MPI.ANY_SOURCE, TAG, status)
            if letter is None:
                return count > 0
            source, size = status.Get_source(), status.Get_count(MPI.BYTE)
            data = bytearray(size)
            letter.Recv([data, MPI.BYTE])
            self._deliver(source, self._decoder.decode(data))
        return True

    def _deliver(self, source: int, message: Message) -> None:
        with self._lock:
            box = self._inboxes.get(type(message))
            if box is not None:
                box.put((source, message))
                return
            if len(self._held) >= self.limits.held_messages:
                raise UnopenedInboxError(
                    f"rank {self.rank}: {len(self._held)} messages wait for an inbox, the last of kind "
                    f"{type(message).__name__} from rank {source}; allowed: {self.limits.held_messages}"
                )
            self._held.append((source, message))
