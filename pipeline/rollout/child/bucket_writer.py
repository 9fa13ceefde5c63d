"""The rank's end of a load: tensors into two buckets by turns; the engine's process reads one while the other fills.

    begin (the call of load_weights) ─► Chunk* ─► LoadEnd with counts          Taken(bucket) ◄─ when its views are used

Nothing follows from what a tensor or a bucket holds: an empty stream is one LoadEnd, and a full last bucket needs no
empty one after it.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence

import torch

from pekoe.pipeline.rollout.child.buckets import Bucket, entry_view, place
from pekoe.pipeline.rollout.child.protocol import Chunk, Entry, LoadEnd, Taken

LOOK_SECONDS = 0.05


class BucketWriter:
    """One load. `check` raises what the engine's process has answered already, or its failure."""

    def __init__(
        self, load: int, buckets: Sequence[Bucket], bucket_bytes: int, send: Callable[[Chunk | LoadEnd], None],
        check: Callable[[], None], limit_seconds: float, on_stall: Callable[[str], Exception],
    ) -> None:  # fmt: skip
        self.load = load
        self.taken: queue.SimpleQueue[Taken] = queue.SimpleQueue()
        self._buckets = buckets
        self._bucket_bytes = bucket_bytes
        self._send = send
        self._check = check
        self._limit = limit_seconds
        self._on_stall = on_stall
        self._free = set(range(len(buckets)))
        self._current = 0
        self._entries: list[Entry] = []
        self._fill = 0
        self.num_tensors = 0
        self.num_bytes = 0

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor; blocks while both buckets are being read. A tensor larger than a bucket has one alone."""
        self._check()
        offset = place(self._fill)
        if self._entries and offset + tensor.nbytes > self._bucket_bytes:
            self.flush()
            offset = 0
        if not self._entries:
            self._wait_free()
        entry = Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)
        memory = self._buckets[self._current].room_for(offset + tensor.nbytes)
        entry_view(memory, entry).copy_(tensor.detach())
        self._entries.append(entry)
        self._fill = offset + tensor.nbytes
        self.num_tensors += 1
        self.num_bytes += tensor.nbytes

    def flush(self) -> None:
        """The current bucket is the other end's from now on."""
        if not self._entries:
            return
        bucket = self._buckets[self._current]
        handle = bucket.handle()
        size = bucket.room_for(0).numel()
        self._free.discard(self._current)
        self._send(Chunk(self.load, self._current, size, tuple(self._entries), handle))
        self._entries, self._fill = [], 0
        self._current = (self._current + 1) % len(self._buckets)

    def end(self) -> None:
        self.flush()
        self._send(LoadEnd(self.load, self.num_tensors, self.num_bytes))

    def break_off(self, reason: str) -> None:
        """The source of the tensors failed: the engine's process must not wait for more."""
        self._send(LoadEnd(self.load, self.num_tensors, self.num_bytes, reason or "the stream broke off"))

    def _wait_free(self) -> None:
        deadline = time.monotonic() + self._limit
        while self._current not in self._free:
            self._check()
            with contextlib.suppress(queue.Empty):
                self._free.add(self.taken.get(timeout=LOOK_SECONDS).bucket)
            if time.monotonic() > deadline:
                raise self._on_stall(f"did not read a bucket of weights within {self._limit:g} s")
