"""Frames on a byte stream between two processes of one machine: a 4-byte length, then that many bytes."""

from __future__ import annotations

import asyncio
import socket
import struct

LENGTH = struct.Struct("<I")
MAX_BYTES = 1 << 30


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def receive(channel: socket.socket) -> bytes | None:
    """The next frame; None at the end of the stream. Raises ValueError for what is no frame."""
    head = _receive_exactly(channel, LENGTH.size)
    return None if head is None else _receive_exactly(channel, _checked_length(head))


async def read(reader: asyncio.StreamReader) -> bytes | None:
    """`receive` for asyncio."""
    try:
        return await reader.readexactly(_checked_length(await reader.readexactly(LENGTH.size)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _checked_length(head: bytes) -> int:
    length = int(LENGTH.unpack(head)[0])
    if length > MAX_BYTES:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_BYTES} are allowed")
    return length


def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = channel.recv(min(size - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
