"""Finished groups on their way from a rank to its node's writer, through memory that the ranks of a node share.

    member rank: put ─► a file in its own folder (named .part, then renamed) ── its path, by message ─► writer: take

A file is read once and removed then. A member holds a bounded number of bytes there and leaves room in the place for
others; where that is not to be had, `put` gives None and the rank writes the groups itself. The folder's name says
whose it is: user, job (with the array's task), run, attempt, rank, process. Folders that dead processes have left are
removed by the next rank that opens one, for a living owner holds a lock on its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pekoe.pipeline import files
from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.schema import info_json, read_info

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
MAX_BYTES = 128 << 20
"""That one rank may have lying there, not taken yet."""
FREE_SHARE, FREE_BYTES = 0.5, 1 << 30
"""Of the place, the lesser of the two stays free: device libraries need it too."""
LOCK = "lock"
ARRAYS = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "versions": np.int32, "turns": np.int32}


class _Row(msgspec.Struct, array_like=True):
    """A trajectory; `arrays` are the bytes of ARRAYS, in that order."""

    arrays: tuple[bytes, ...]
    prompt_length: int
    reward: float
    finish: int
    seed: int
    sample: int
    info: bytes
    extra: dict[str, bytes] = {}
    """Bytes of the arrays of `Trajectory.extra`."""


class _Batch(msgspec.Struct, array_like=True):
    """A group; the example's name as UTF-8, for it may be no valid text."""

    number: int
    try_number: int
    example: bytes
    rows: tuple[_Row, ...]


def encode(groups: Sequence[Group]) -> bytes:
    """Groups as one buffer."""
    batches = [
        _Batch(g.number, g.try_number, g.example.encode("utf-8", "surrogatepass"), tuple(map(_row, g.trajectories)))
        for g in groups
    ]
    return msgspec.msgpack.encode(batches)


def decode(data: bytes) -> list[Group]:
    """Inverse of `encode`; the arrays are views of the buffer, not to be written into. msgspec.DecodeError."""
    return [
        Group(b.number, b.try_number, b.example.decode("utf-8", "surrogatepass"), [_trajectory(r) for r in b.rows])
        for b in msgspec.msgpack.decode(data, type=list[_Batch])
    ]


def _row(t: Trajectory) -> _Row:
    arrays = tuple(np.ascontiguousarray(getattr(t, name), dtype).tobytes() for name, dtype in ARRAYS.items())
    extra = {name: np.ascontiguousarray(values, np.float32).tobytes() for name, values in t.extra.items()}
    return _Row(arrays, t.prompt_length, float(t.reward), int(t.finish), t.seed, t.sample, info_json(t.info), extra)


def _trajectory(row: _Row) -> Trajectory:
    arrays: dict[str, Any] = {
        name: np.frombuffer(data, dtype) for (name, dtype), data in zip(ARRAYS.items(), row.arrays, strict=True)
    }
    return Trajectory(
        **arrays, prompt_length=row.prompt_length, reward=row.reward, finish=Finish(row.finish), seed=row.seed,
        sample=row.sample, info=read_info(row.info),
        extra={name: np.frombuffer(data, np.float32) for name, data in row.extra.items()},
    )  # fmt: skip


class HandOver:
    """One rank's end: a member puts, the writer takes. One thread (the rollout loop's) calls it."""

    def __init__(
        self, run: RunDirectory, attempt: int, job: str | None, rank: int, writer: int, *,
        memory: Path = MEMORY, max_bytes: int = MAX_BYTES,
    ) -> None:  # fmt: skip
        """`writer`: the rank of this node that writes, which may be this one. Without shared memory at `memory` the
        folder for temporary files is taken."""
        self.rank, self.writer = rank, writer
        self._max_bytes = max_bytes
        self._lying: dict[Path, int] = {}
        """Bytes of each file that was put and not taken yet, as far as known."""
        self._number = 0
        self._complained = False
        base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        remove_dead_folders(base)
        name = f"{_prefix()}{job or 'local'}-{_digest(run)}-attempt-{attempt}-rank-{rank}-{os.getpid()}"
        self._folder, self._lock = _make_folder(base, name)

    def put(self, groups: Sequence[Group]) -> str | None:
        """The path of a file that holds these groups, or None where there is no room for it."""
        data = encode(groups)
        for path in [path for path in self._lying if not path.exists()]:
            del self._lying[path]
        path = self._folder / f"{self._number:08d}"
        reason = self._no_room(len(data)) or self._write(path, data)
        if reason:
            if not self._complained:
                self._complained = True
                logger.warning("groups are written by this rank itself, not by rank %d: %s", self.writer, reason)
            return None
        self._number += 1
        self._lying[path] = len(data)
        return str(path)

    def take(self, path: str) -> list[Group]:
        """The groups of a file, which is gone then. FileNotFoundError says what ranks of one host must share."""
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                error.errno,
                "groups that another rank of this host handed over cannot be seen here: the ranks of a host must share "
                "this folder (containers: one for all of them), or cluster.ranks_per_writer be above the rollout ranks",
                path,
            ) from None
        Path(path).unlink()
        return decode(data)

    def close(self) -> None:
        """Removes this rank's folder with what nobody has taken."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def _no_room(self, num_bytes: int) -> str:
        """Empty, or why so many bytes may not be put."""
        lying = sum(self._lying.values())
        if lying + num_bytes > self._max_bytes:
            return f"{lying} bytes lie in {self._folder} and are not taken; allowed: {self._max_bytes}"
        room = os.statvfs(self._folder)
        free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        spared = min(int(FREE_SHARE * whole), FREE_BYTES)
        if free - num_bytes < spared:
            return f"{self._folder.parent} has {free} bytes free, of which {spared} stay so"
        return ""

    def _write(self, path: Path, data: bytes) -> str:
        """Empty, or why there was no room after all."""
        part = path.with_suffix(".part")
        try:
            part.write_bytes(data)
            os.rename(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            if not files.is_full(error):
                raise
            return str(error)
        return ""


def remove_dead_folders(base: Path) -> None:
    """Removes this user's folders whose owner lives no more: its lock is free."""
    for folder in base.glob(f"{_prefix()}*"):
        with suppress(OSError):
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _make_folder(base: Path, name: str) -> tuple[Path, int]:
    """The folder and the descriptor of its lock, which is held before the folder has its name."""
    part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=base))
    lock = os.open(part / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = base / name
    os.rename(part, folder)
    return folder, lock


def _prefix() -> str:
    return f"pekoe-groups-{os.getuid()}-"


def _digest(run: RunDirectory) -> str:
    return hashlib.blake2b(os.fsencode(run.path.absolute()), digest_size=6).hexdigest()
