"""What lies in the files of rollout arrays, field by field, and what the files are called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pekoe.pipeline.messages import Assign, DiskRefused, Published, Rejected
from pekoe.pipeline.run_directory import RunDirectory

OFFERED = "offered"
HELD = "held"
STATE = "state.json"
WORLD = "world.json"
FINISHED, STOPPED = "finished", "stopped"
"""Outcomes: done, or to be resumed by a later attempt."""

_WORLD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_LEASE_NAME = re.compile(r"(\d+)-(\d+)\.v(\d+)\.a(\d+)\.(\d+)\.msgpack")
_NOTICE_NAME = re.compile(r"([0-9a-f]{8}-\d{4})\.(\d{8,})\.msgpack")

GroupKey = tuple[int, int]
"""(group, try)."""
LeaseKey = tuple[int, int, int]
"""(group, try, serial of the offer)."""
Told = Published | Rejected | DiskRefused
"""What a world tells the head."""


class SharedWeights(msgspec.Struct, frozen=True):
    """Where the weights of a version lie."""

    version: int
    folder: str
    """Relative to the run directory."""
    token: str
    """Tells these weights from those that another attempt wrote under the same number."""


class BoardState(msgspec.Struct, frozen=True):
    """`leases/state.json`: what the head says to all worlds."""

    attempt: int
    counter: int
    """Goes up with every write: whoever sees it stand still for long has no head any more."""
    config_hash: str
    version: int = -1
    """Of the newest weights; -1: none yet."""
    weights: SharedWeights | None = None
    starving: bool = False
    """The trainer waits for groups: publish what is done now."""
    outcome: str = ""
    """`finished` or `stopped`; empty while the attempt goes on."""
    cancelled: tuple[int, ...] = ()
    """Serials of leases that somebody holds and nobody wants."""
    beat_seconds: float = 2.0
    """How often a world must say that it lives."""
    num_worlds: int = 0
    """Live ones."""
    seconds_unchanged: float = 0.0
    """Not in the file: for how long the reader has seen the same counter, by its own clock."""


class WorldState(msgspec.Struct, frozen=True):
    """`leases/WORLD/world.json`: what a world says of itself."""

    attempt: int
    """That it follows."""
    counter: int
    incarnation: str
    """Of the process that wrote it."""
    slots: int
    """Groups that it can hold at once."""
    num_ranks: int
    version: int
    """Of the weights that it samples with; -1: none yet."""
    held: tuple[LeaseKey, ...] = ()
    host: str = ""
    job_id: str = ""
    left: bool = False
    """It has ended in order."""


class Lease(msgspec.Struct, frozen=True):
    """A file in `offered/` or `held/`."""

    assign: Assign
    attempt: int
    serial: int
    config_hash: str


class Notice(msgspec.Struct, frozen=True):
    """A file in `inbox/WORLD/`."""

    world: str
    attempt: int
    """Of the leases that it is about."""
    messages: tuple[Told, ...]
    leases: tuple[LeaseKey, ...]
    """That ended with these messages."""


@dataclass(frozen=True)
class AttachedWorld:
    """A live world, as its last sign and the head's own books have it."""

    name: str
    slots: int
    num_ranks: int
    version: int
    num_held: int
    seconds_silent: float
    """Since its last sign, by the head's clock."""
    host: str = ""
    job_id: str = ""


@dataclass(frozen=True, order=True)
class LeaseName:
    """The name of an offer's file says all that a world must know to choose among offers without opening them."""

    group: int
    try_number: int
    min_version: int
    attempt: int
    serial: int
    """Unique within the attempt: a group that is offered again gets a new one."""

    def __str__(self) -> str:
        return f"{self.group:06d}-{self.try_number}.v{self.min_version}.a{self.attempt}.{self.serial}.msgpack"

    @property
    def key(self) -> GroupKey:
        return self.group, self.try_number

    @staticmethod
    def parse(name: str) -> LeaseName | None:
        """None for a file that is no lease (a temporary one)."""
        match = _LEASE_NAME.fullmatch(name)
        return LeaseName(*map(int, match.groups())) if match else None


def notice_name(stream: str, number: int) -> str:
    """Name of the `number`-th notice of a stream; a world begins a new stream each time that it joins."""
    return f"{stream}.{number:08d}.msgpack"


def parse_notice_name(name: str) -> tuple[str, int] | None:
    """(stream, number), or None for a temporary file."""
    match = _NOTICE_NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def check_world_name(world: str) -> str:
    """The name; ValueError if no folder of leases can be called so."""
    if not is_world_name(world):
        raise ValueError(f"world {world!r}: a name is at most 100 letters, digits, '_' and '-', and not {OFFERED!r}")
    return world


def is_world_name(name: str) -> bool:
    return _WORLD_NAME.fullmatch(name) is not None and name != OFFERED


def state_file(run: RunDirectory) -> Path:
    return run.leases / STATE


def offered_folder(run: RunDirectory) -> Path:
    return run.leases / OFFERED


def world_folder(run: RunDirectory, world: str) -> Path:
    return run.leases / world


def held_folder(run: RunDirectory, world: str) -> Path:
    return run.leases / world / HELD


def world_file(run: RunDirectory, world: str) -> Path:
    return run.leases / world / WORLD


def inbox_folder(run: RunDirectory, world: str) -> Path:
    return run.inbox / world


def shards_of(attempt: int) -> str:
    """How the paths of all shards of an attempt begin, relative to the run directory (`trajectory/writer.py`)."""
    return f"shards/{attempt}-"
