"""The host's end of a load: chunks come in, the engine reads the views one by one."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Sequence

import torch

from pekoe.pipeline.rollout.child.buckets import ReceivedBucket, entry_view
from pekoe.pipeline.rollout.child.protocol import Chunk, LoadEnd, Taken


class BucketReader:
    """Where the host's loop puts chunks and the engine's thread takes them from."""

    def __init__(self, buckets: Sequence[ReceivedBucket], send: Callable[[Taken], None]) -> None:
        self.frames: queue.SimpleQueue[Chunk | LoadEnd] = queue.SimpleQueue()
        self._buckets = buckets
        self._send = send

    def tensors(self, load: int) -> Generator[tuple[str, torch.Tensor], None, None]:
        """All tensors of a load, each valid until the next is asked for. RuntimeError when the sender broke off, or
        counts or bytes differ from what it says it has sent. The rank's death, and with it of this process, ends the
        wait for a chunk."""
        num_tensors = num_bytes = 0
        try:
            while True:
                frame = self.frames.get()
                if frame.load != load:
                    continue
                if isinstance(frame, LoadEnd):
                    _check_end(frame, num_tensors, num_bytes)
                    return
                memory = self._buckets[frame.bucket].memory(frame.size, frame.handle)
                for entry in frame.entries:
                    tensor = entry_view(memory, entry)
                    num_tensors += 1
                    num_bytes += tensor.nbytes
                    yield entry.name, tensor
                del memory, tensor
                self._buckets[frame.bucket].used_up()
                self._send(Taken(load, frame.bucket))
        finally:
            for bucket in self._buckets:
                bucket.rest()


def _check_end(end: LoadEnd, num_tensors: int, num_bytes: int) -> None:
    if end.failure:
        raise RuntimeError(f"the weights broke off after {end.num_tensors} tensors: {end.failure}")
    if (num_tensors, num_bytes) != (end.num_tensors, end.num_bytes):
        raise RuntimeError(
            f"{num_tensors} tensors of {num_bytes} bytes came, {end.num_tensors} of {end.num_bytes} were sent"
        )
