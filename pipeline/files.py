"""The thin layer that takes every durable write (shards, ledger, checkpoints, pointers): one place to inject faults.

    write_bytes   a file, whole or not at all: temporary name in the same folder, fsync, rename, fsync of the folder
    create        a large file, piece by piece, hashed as it is written; its folder is published as a whole
    publish       a closed temporary file or a sealed folder gets its final name
    remove, put_away      the end of a file or folder; at no instant does a part of a folder stand under its name

All of them go through `disk`, whose methods are the single operations of the filesystem: a test puts one in its place
that fails at the k-th, or after which nothing happens any more. Nothing locks: on shared filesystems locks may lie.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

PART = ".part"
DISCARDED = ".discarded"
LATE = (errno.ENOENT, errno.ESTALE)
"""What a network filesystem says of a name or handle that is not yet, or no longer, in this node's view."""
FULL = (errno.ENOSPC, errno.EDQUOT)
DIGEST_BYTES = 16


class Disk:
    """The operations that durability rests on, one method each."""

    def create(self, path: Path) -> BinaryIO:
        """An empty file, open for writing; what stood there is gone."""
        return open(path, "wb", buffering=0)

    def write(self, file: BinaryIO, data: Any) -> None:
        """All of `data`."""
        view = memoryview(data).cast("B")
        while view:
            view = view[file.write(view) :]

    def write_with(self, path: Path, write: Callable[[Path], object]) -> None:
        """A library writes the file by itself."""
        write(path)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Names in the folder become durable; filesystems that refuse it (EINVAL) are accepted."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, path: Path) -> int:
        """A descriptor for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()


disk = Disk()
"""What every function here works on; replaced by tests only."""


def is_full(error: OSError) -> bool:
    """No space or no quota left: room may come, so the caller keeps what it has and tries again."""
    return error.errno in FULL


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Makes names in the folder durable."""
    disk.sync_folder(folder)


def part_name(final: Path) -> Path:
    """The temporary name under which `final` is written, in the same folder."""
    return final.with_name(f"{final.name}.{os.getpid()}{PART}")


def make_folder(folder: Path) -> None:
    """A folder and its parents, durably."""
    if not folder.is_dir():
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)


def publish(part: Path, final: Path) -> None:
    """Makes a closed temporary file (or folder) visible under its final name, durably."""
    if part.is_file():
        fsync_file(part)
    disk.rename(part, final)
    disk.sync_folder(final.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file atomically and durably; on failure only the temporary file is removed."""
    part = part_name(path)
    try:
        with create(part) as file:
            file.write(data)
        disk.rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    disk.sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of readable JSON."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


class DurableFile:
    """A file being written piece by piece: fsynced when it is closed well, its size and hash known by then.

    Looks like a stream to libraries that only write. The caller removes what a failure leaves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._file = disk.create(path)

    @property
    def digest(self) -> str:
        """BLAKE2b of what was written so far, 32 hex digits."""
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        disk.write(self._file, view)
        self._hash.update(view)
        self.num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        """Nothing is buffered."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Without fsync; leaving the `with` block well does that."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                disk.sync(self._file.fileno())
        finally:
            self._file.close()


def create(path: Path) -> DurableFile:
    """Opens a new file for writing through this layer; use it as a context manager."""
    return DurableFile(path)


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """A file that a library writes by itself, fsynced; the caller removes what a failure leaves."""
    disk.write_with(path, write)
    fsync_file(path)


def remove(path: Path) -> bool:
    """False when it was gone already."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return False
    return True


def put_away(folder: Path) -> None:
    """Removes a folder; at no instant does a part of it stand under its name."""
    away = folder.with_name(f"{folder.name}.{os.getpid()}{DISCARDED}")
    try:
        disk.rename(folder, away)
    except FileNotFoundError:
        return
    disk.remove_tree(away)


def read_bytes(path: Path, retry_seconds: float = 5.0) -> bytes:
    """Reads a small file; ENOENT and ESTALE (late names and handles of a network filesystem) are tried again."""
    deadline = time.monotonic() + retry_seconds
    pause = 0.01
    while True:
        try:
            return disk.read(path)
        except OSError as error:
            if error.errno not in LATE or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 2, 0.5)


def read_json(path: Path, retry_seconds: float = 5.0) -> Any:
    return json.loads(read_bytes(path, retry_seconds))
