"""Accepting connections with a bound: those above it, and those for which no file descriptor is left, wait in the
kernel's queue instead of failing whatever else this process opens."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable

NO_DESCRIPTOR_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RETRY_SECONDS = 0.05
SHARE_OF_FILES = 4
"""Connections take at most one of so many of the file descriptors that the process may open."""


def connection_limit(wanted: int) -> int:
    """At most `wanted`, and no more than the process's limit of open files leaves."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft // SHARE_OF_FILES))


async def accept_forever(
    listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], num_open: Callable[[], int], limit: int
) -> None:
    """Hands each connection of the non-blocking `listener` to a protocol, while `num_open()` is below `limit`."""
    loop = asyncio.get_running_loop()
    while True:
        while num_open() >= limit:
            await asyncio.sleep(RETRY_SECONDS)
        try:
            connection, _ = await loop.sock_accept(listener)
        except ConnectionAbortedError:
            continue
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR_LEFT:
                raise
            await asyncio.sleep(RETRY_SECONDS)
            continue
        try:
            await loop.connect_accepted_socket(make_protocol, connection)
        except OSError:
            connection.close()
