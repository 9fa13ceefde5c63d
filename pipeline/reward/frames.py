"""Frames between rank, supervisor and workers: a 4-byte length, then one msgpack struct.

What goes down to a worker carries the arguments of a call as a pickle, so that tuples, integer keys and arrays of an
example arrive as they are. What comes up is never unpickled: a worker runs other people's code.
"""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec

LENGTH = struct.Struct("<I")
MAX_BYTES = 1 << 30


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Root of all frames; the tag is the class name."""


class Setup(Frame, frozen=True):
    """Rank -> supervisor, first: what to run."""

    targets: tuple[str, ...]
    """Reward functions that every worker loads before its first call."""
    processes: int
    timeout_seconds: float
    start_seconds: float
    """Limit for a worker to start and for it to load a function."""
    path: tuple[str, ...]
    """The rank's `sys.path`: a worker finds what the rank finds."""


class Call(Frame, frozen=True):
    """Rank -> supervisor -> worker: judge one completion."""

    number: int
    target: str
    payload: bytes


class Forget(Frame, frozen=True):
    """Rank -> supervisor: nobody waits for this call; it need not start."""

    number: int


class Answer(Frame, frozen=True):
    """Worker -> supervisor -> rank: what became of a call."""

    number: int
    value: float
    status: str
    detail: str
    seconds: float


class Load(Frame, frozen=True):
    """Supervisor -> worker: import a function (and warm it up)."""

    target: str
    path: tuple[str, ...]


class Loaded(Frame, frozen=True):
    """Worker -> supervisor: the function can be called, or why not."""

    error: str


class Workers(Frame, frozen=True):
    """Supervisor -> rank: the pool is complete; process ids, each also the id of a session and process group."""

    pids: tuple[int, ...]


class Failed(Frame, frozen=True):
    """Supervisor -> rank: no worker can be had; the pool is of no use any more."""

    detail: str


AnyFrame = Setup | Call | Forget | Answer | Load | Loaded | Workers | Failed
_decoder = msgspec.msgpack.Decoder(AnyFrame)


def encode(frame: Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return LENGTH.pack(len(body)) + body


def send_frame(channel: socket.socket, frame: Frame) -> None:
    channel.sendall(encode(frame))


def receive_frame(channel: socket.socket) -> AnyFrame | None:
    """The next frame; None at the end of the stream. Raises ValueError for what is no frame."""
    head = _receive_exactly(channel, LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(channel, _checked_length(head))
    return None if body is None else _decoder.decode(body)


async def read_frame(reader: asyncio.StreamReader) -> AnyFrame | None:
    """`receive_frame` for asyncio."""
    try:
        head = await reader.readexactly(LENGTH.size)
        return _decoder.decode(await reader.readexactly(_checked_length(head)))
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
