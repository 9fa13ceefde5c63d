"""The commands of a turn as bytes, for the ranks of one engine: msgpack, with the name of each command's type."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec

from pekoe.pipeline.rollout.engines.vllm.commands import Command, Turn

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Command)}


def encode_turn(turn: Turn) -> bytes:
    """TypeError for a command with something in it that is neither plain data nor a path."""
    return _ENCODER.encode((turn.step, [(type(command).__name__, command) for command in turn.commands]))


def decode_turn(data: bytes) -> Turn:
    """The inverse; msgspec.ValidationError for what is none."""
    step, commands = _DECODER.decode(data)
    return Turn(tuple(_KIND_DECODERS[name].decode(command) for name, command in commands), step)


def _encode(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a command holds {type(value).__name__}: {value!r}; allowed: plain data and paths")


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is not Path:
        raise TypeError(f"a command holds {kind.__name__}: {value!r}; allowed: plain data and paths")
    return Path(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
_DECODER = msgspec.msgpack.Decoder(tuple[bool, list[tuple[str, msgspec.Raw]]])
_KIND_DECODERS = {name: msgspec.msgpack.Decoder(kind, dec_hook=_decode) for name, kind in KINDS.items()}
