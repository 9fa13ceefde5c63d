"""Ranges of ports for engines that open several by themselves: disjoint between all processes of a node.

An engine looks for a free port, closes the probe, and binds it later: two engines that start together find the same
one. So each gets a range of its own, all on one grid. The first port of a range is a guard that its holder keeps
bound: whoever plans the same range fails at once, whatever its job, user or container, and the range is free again when
the process ends.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

BLOCK_PORTS = 32
"""Of which the first is the guard."""
LOWEST, HIGHEST = 10240, 65535
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class NoPortsError(OSError):
    """Every range of this node is taken."""


class PortBlock:
    """Ports `first` … `last` are the holder's until `release` or the end of the process."""

    def __init__(self, guard: socket.socket) -> None:
        self._guard = guard
        self.first = int(guard.getsockname()[1]) + 1
        self.last = self.first + BLOCK_PORTS - 2

    @property
    def ports(self) -> range:
        return range(self.first, self.last + 1)

    def release(self) -> None:
        self._guard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"ports {self.first}-{self.last}"


def reserve(at_least: int = LOWEST) -> PortBlock:
    """A range whose ports are free now. NoPortsError if there is none.

    Ranges lie outside of what the kernel gives out by itself, as far as it leaves room. `at_least`: the user's lowest
    port; an equal one in several processes still gives distinct ranges.
    """
    for first in _firsts(at_least):
        guard = _bound(first)
        if guard is None:
            continue
        if all(_is_free(port) for port in range(first + 1, first + BLOCK_PORTS)):
            return PortBlock(guard)
        guard.close()
    raise NoPortsError(errno.EADDRINUSE, f"no {BLOCK_PORTS} free ports in a row from {at_least} on this node")


def _firsts(at_least: int) -> Iterator[int]:
    """Guards: outside of the kernel's own choice first, in a random order, since many look at once."""
    low, high = _ephemeral_range()
    lowest = -(-max(at_least, 1024) // BLOCK_PORTS) * BLOCK_PORTS
    inside: list[int] = []
    outside: list[int] = []
    for first in range(lowest, HIGHEST - BLOCK_PORTS + 2, BLOCK_PORTS):
        (outside if first + BLOCK_PORTS <= low or first > high else inside).append(first)
    for firsts in (outside, inside):
        random.SystemRandom().shuffle(firsts)
        yield from firsts


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = EPHEMERAL.read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(low), int(high)


def _bound(port: int) -> socket.socket | None:
    guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        guard.bind(("", port))
    except OSError:
        guard.close()
        return None
    return guard


def _is_free(port: int) -> bool:
    probe = _bound(port)
    if probe is not None:
        probe.close()
    return probe is not None
