"""Start-up values over MPI: one rank's for all, or everybody's for everybody. Main thread, all ranks, in one order.

Nothing here blocks inside MPI: a request is tested until it is done, its time is over, or the rank has failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from mpi4py import MPI

VALUE_BYTES = 1 << 20
"""Of one value, as JSON."""
ALL_BYTES = 16 << 20
"""Of all ranks' values together."""
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-5, 5e-3
LENGTH_BYTES = 8


class Exchange:
    """`check` is called while waiting; it does not return from a failure of this rank."""

    def __init__(self, communicator: MPI.Intracomm, check: Callable[[], None], seconds: float) -> None:
        self._communicator = communicator
        self._check = check
        self._seconds = seconds
        self._rank: int = communicator.Get_rank()

    def share(self, value: Any, root: int = 0) -> Any:
        """Everyone gets the root's value. ValueError on the root for one that is too large, TimeoutError."""
        data = bytearray(_encode(value, "share")) if self._rank == root else bytearray()
        length = bytearray(len(data).to_bytes(LENGTH_BYTES, "little"))
        self._wait(self._communicator.Ibcast(length, root), "the shared value")
        if self._rank != root:
            data = bytearray(int.from_bytes(length, "little"))
        self._wait(self._communicator.Ibcast(data, root), "the shared value")
        return msgspec.json.decode(data)

    def collect(self, value: Any) -> list[Any]:
        """Everyone gets the values of all ranks, by rank. ValueError where one or all are too large, TimeoutError."""
        from mpi4py import MPI

        data = bytearray(_encode(value, "collect"))
        size = self._communicator.Get_size()
        lengths = bytearray(LENGTH_BYTES * size)
        length = bytearray(len(data).to_bytes(LENGTH_BYTES, "little"))
        self._wait(self._communicator.Iallgather(length, lengths), "the values of all ranks")
        counts = [
            int.from_bytes(lengths[start : start + LENGTH_BYTES], "little")
            for start in range(0, len(lengths), LENGTH_BYTES)
        ]
        if sum(counts) > ALL_BYTES:
            raise ValueError(f"collect: the values have {sum(counts)} bytes together; allowed: at most {ALL_BYTES}")
        joined = bytearray(sum(counts))
        request = self._communicator.Iallgatherv([data, MPI.BYTE], [joined, counts, None, MPI.BYTE])
        self._wait(request, "the values of all ranks")
        values, start = [], 0
        for count in counts:
            values.append(msgspec.json.decode(joined[start : start + count]))
            start += count
        return values

    def _wait(self, request: MPI.Request, what: str) -> None:
        deadline, pause = time.monotonic() + self._seconds, SHORTEST_PAUSE
        while not request.Test():
            self._check()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self._rank}: {what} did not come within {self._seconds} s (limit: cluster.setup_seconds)"
                )
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)


def _encode(value: Any, what: str) -> bytes:
    data = msgspec.json.encode(value)
    if len(data) > VALUE_BYTES:
        raise ValueError(f"{what}: the value has {len(data)} bytes; allowed: at most {VALUE_BYTES}")
    return data
