"""Frames between rank, supervisor and workers: each one msgpack struct.

What goes down to a worker carries the arguments of a call as a pickle, so that tuples, integer keys and arrays of an
example arrive as they are. What comes up is never unpickled: a worker runs other people's code.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec

from pekoe.pipeline import framed_stream


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
    return framed_stream.frame(msgspec.msgpack.encode(frame))


def send_frame(channel: socket.socket, frame: Frame) -> None:
    channel.sendall(encode(frame))


def receive_frame(channel: socket.socket) -> AnyFrame | None:
    """The next frame; None at the end of the stream. Raises ValueError for what is no frame."""
    body = framed_stream.receive(channel)
    return None if body is None else _decoder.decode(body)


async def read_frame(reader: asyncio.StreamReader) -> AnyFrame | None:
    """`receive_frame` for asyncio."""
    body = await framed_stream.read(reader)
    return None if body is None else _decoder.decode(body)
