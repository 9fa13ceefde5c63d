"""The private line of one engine over several ranks: all of them apply the same commands, then step together.

    leader   commands of a turn ─► share ──(gloo broadcast: one small message)──► share ─► the same commands   follower
    both     apply them ─► one step of the engine (tensor-parallel collectives) ─► sampled tokens into the digest

With each turn the leader sends the digest of all tokens that it has sampled: a rank whose own digest differs raises at
once, where the next collective would hang or mix up sequences. A follower waits in a receive, which costs no CPU and
has no limit, since an engine may be idle for hours. What ends that is the end of the leader: the kernel closes its
connections, and a thread that waits on them on every rank hears of it within milliseconds.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store

from pekoe.pipeline.devices.device import for_backend
from pekoe.pipeline.rollout.engine import Instance

FOREVER = timedelta(days=3650)
MEET_SECONDS = 600.0
"""How much later than the first rank the last one may come."""
HEADER = struct.Struct("<QQ8s")
"""Number of the turn, bytes of the commands, digest of the sampled tokens."""
MESSAGE_BYTES = 2048
"""What one broadcast carries: the header and commands of usual size. More of them take a second one."""
BYE_TAG = 7
LEAVE_SECONDS = 10.0


class InstanceError(RuntimeError):
    """The ranks of an instance are not in step any more, or one of them is gone: the whole instance must end."""


class TokenDigest:
    """Running digest of the sampled tokens, in the order of the steps."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, sampled: Iterable[tuple[int, int, float]]) -> None:
        """What a step has sampled: (number of the sequence, token, log-prob)."""
        self._hash.update(array("q", [x for number, token, _ in sampled for x in (number, token)]).tobytes())

    @property
    def value(self) -> bytes:
        return self._hash.digest()


class Lockstep:
    """One rank's end of the line. `share` belongs to the engine's thread; `close` may come from any."""

    def __init__(
        self, instance: Instance, on_loss: Callable[[BaseException], None], limit_seconds: float = MEET_SECONDS
    ) -> None:
        """Blocks until all ranks of the instance are there, TimeoutError after `limit_seconds`. `on_loss` is called, by
        a thread of the line's own, when another rank has gone."""
        assert instance.store is not None
        self.instance = instance
        self.digest = TokenDigest()
        self.turn = 0
        self._on_loss = on_loss
        self._closed = threading.Event()
        store = PrefixStore("lockstep", instance.store)
        self.names = _meet(store, instance, limit_seconds)
        """What each rank is called in errors."""
        self._group: Any = for_backend("gloo").process_group(
            PrefixStore("group", store), instance.rank, instance.size, FOREVER, instance.host
        )
        self._message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        self._options = BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank,), name=f"lockstep-watch-{rank}", daemon=True)
            for rank in range(instance.size)
            if rank != instance.rank
        ]
        for watcher in self._watchers:
            watcher.start()

    @property
    def leads(self) -> bool:
        return self.instance.rank == 0

    def share(self, commands: bytes = b"") -> bytes:
        """One turn: gives every rank the leader's commands; a follower waits for them without limit.

        InstanceError when a rank is gone, or its sampled tokens are others than the leader's.
        """
        self.turn += 1
        try:
            return self._send(commands) if self.leads else self._receive()
        except InstanceError:
            raise
        except RuntimeError as error:
            raise InstanceError(f"{self._me}: an engine of {self.instance.size} ranks is broken: {error}") from error

    def close(self) -> None:
        """This rank leaves in order, together with the others: each tells the others, so that they do not take it for a
        loss. Those that do not come within a few seconds are not waited for. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        for rank in range(self.instance.size):
            if rank != self.instance.rank:
                try:
                    self._group.send([torch.zeros(1, dtype=torch.uint8)], rank, BYE_TAG)
                except RuntimeError:
                    continue
        deadline = time.monotonic() + LEAVE_SECONDS
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))

    def _send(self, commands: bytes) -> bytes:
        head = HEADER.pack(self.turn, len(commands), self.digest.value)
        room = MESSAGE_BYTES - HEADER.size
        _put(self._message, head + commands[:room])
        self._broadcast(self._message)
        if len(commands) > room:
            rest = torch.frombuffer(bytearray(commands[room:]), dtype=torch.uint8)
            self._broadcast(rest)
        return commands

    def _receive(self) -> bytes:
        self._broadcast(self._message)
        data = self._message.numpy().tobytes()
        turn, size, digest = HEADER.unpack_from(data)
        if turn != self.turn:
            raise InstanceError(f"{self._me} is in turn {self.turn}, {self.names[0]} (the leader) in turn {turn}")
        if digest != self.digest.value:
            raise InstanceError(
                f"{self._me} has sampled other tokens than {self.names[0]} (the leader) before turn {turn}: digest "
                f"{self.digest.value.hex()} here, {digest.hex()} there; the ranks of an engine must run the same "
                "software with the same seeds"
            )
        room = MESSAGE_BYTES - HEADER.size
        if size <= room:
            return data[HEADER.size : HEADER.size + size]
        rest = torch.empty(size - room, dtype=torch.uint8)
        self._broadcast(rest)
        return data[HEADER.size :] + rest.numpy().tobytes()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        self._group.broadcast([buffer], self._options).wait()

    def _watch(self, rank: int) -> None:
        """Waits until another rank says that it leaves, or its connection ends."""
        try:
            self._group.recv([torch.zeros(1, dtype=torch.uint8)], rank, BYE_TAG).wait()
        except RuntimeError as error:
            if not self._closed.is_set():
                loss = InstanceError(f"{self._me}: {self.names[rank]} is gone")
                loss.__cause__ = error
                self._on_loss(loss)

    @property
    def _me(self) -> str:
        return self.names[self.instance.rank]


def _meet(store: Store, instance: Instance, limit_seconds: float) -> list[str]:
    """Waits until all ranks have come, and learns their names. Only then does nobody wait for ever to connect."""
    mine = f"rank {instance.rank} of {instance.size} (process {os.getpid()} on {socket.gethostname()})"
    store.set(f"name/{instance.rank}", mine)
    names = []
    for rank in range(instance.size):
        try:
            store.wait([f"name/{rank}"], timedelta(seconds=limit_seconds))
        except RuntimeError as error:
            raise TimeoutError(
                f"{mine}: rank {rank} of the same engine did not come within {limit_seconds:g} s"
            ) from error
        names.append(bytes(store.get(f"name/{rank}")).decode())
    return names


def _put(buffer: torch.Tensor, data: bytes) -> None:
    buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
