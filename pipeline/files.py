"""The thin layer that takes every durable write (shards, ledger, checkpoints, pointers): one place to inject faults.

    write_bytes   a file, whole or not at all: temporary name in the same folder, fsync, rename, fsync of the folder
    create, copy  a large file, piece by piece, hashed as it is written; its folder is published as a whole
    publish       a closed temporary file or a sealed folder gets its final name
    replace_folder        the same where a folder of that name stands: the old one goes when the new one has its name
    remove, put_away      the end of a file or folder; at no instant does a part of a folder stand under its name

All of them go through `disk`, whose methods are the single operations of the filesystem: a test puts one in its place
that fails at the k-th, or after which nothing happens any more. Nothing locks: on shared filesystems locks may lie.

An OSError of these functions means: not known to be durable. Under the final name then lies what was there before, or
the new content as a whole; to do it again is always right.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

PART = ".part"
DISCARDED = ".discarded"
"""On the way out: contents may be missing; whoever owns the folder around it removes it."""
PREVIOUS = ".previous"
"""A whole folder whose successor is about to get its name."""
LATE = (errno.ENOENT, errno.ESTALE)
"""What a network filesystem says of a name or handle that is not yet, or no longer, in this node's view."""
FULL = (errno.ENOSPC, errno.EDQUOT)
DIGEST_BYTES = 16
COPY_BYTES = 1 << 20


class Disk:
    """The operations that durability rests on, one method each."""

    def create(self, path: Path) -> BinaryIO:
        """An empty file, open for writing; what stood there is gone."""
        return open(path, "wb", buffering=0)

    def append(self, path: Path) -> BinaryIO:
        """A file open for writing at its end, made if it is not there."""
        return open(path, "ab", buffering=0)

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

    def make_folder(self, folder: Path, mode: int = 0o777) -> None:
        """One level; a folder that is there stays."""
        folder.mkdir(mode=mode, exist_ok=True)

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


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """A folder and its parents, durably; `mode` is the folder's own."""
    if not folder.is_dir():
        make_folder(folder.parent)
        disk.make_folder(folder, mode)
        disk.sync_folder(folder.parent)


def publish(part: Path, final: Path) -> None:
    """Makes a closed temporary file (or folder) visible under its final name, durably."""
    if part.is_file():
        fsync_file(part)
    disk.rename(part, final)
    disk.sync_folder(final.parent)


def replace_folder(part: Path, final: Path) -> None:
    """Publishes a sealed folder where an older one may stand; the older one is deleted afterwards.

    A crash between the two renames leaves the old one as NAME.previous: `restore_folder` gives it its name back.
    """
    previous = final.with_name(f"{final.name}{PREVIOUS}")
    if final.is_dir():
        put_away(previous)
        disk.rename(final, previous)
    publish(part, final)
    put_away(previous)


def restore_folder(final: Path) -> bool:
    """After a crash inside `replace_folder`; True when the older folder has its name again."""
    previous = final.with_name(f"{final.name}{PREVIOUS}")
    if final.is_dir() or not previous.is_dir():
        return False
    publish(previous, final)
    return True


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file atomically and durably; on failure only the temporary file is removed."""
    part = part_name(path)
    try:
        with create(part) as file:
            file.write(data)
        disk.rename(part, path)
    except BaseException:
        with suppress(OSError):
            disk.remove(part)
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


def copy(source: Path, target: Path) -> None:
    """A copy of a file's bytes in a folder that is not published yet; the caller removes what a failure leaves."""
    with open(source, "rb") as content, create(target) as file:
        while block := content.read(COPY_BYTES):
            file.write(block)


def fsync_tree(folder: Path) -> None:
    """Makes every name below the folder durable; the files themselves must be already."""
    for path, _, _ in os.walk(folder):
        disk.sync_folder(Path(path))


def remove(path: Path) -> bool:
    """False when it was gone already."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return False
    return True


def discarded_name(folder: Path) -> Path:
    """A new name for a folder on its way out."""
    return folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}{DISCARDED}")


def put_away(folder: Path) -> None:
    """Removes a folder, if it is there; at no instant does a part of it stand under its name.

    What cannot be deleted (a file that another node holds open) stays as `*.discarded`.
    """
    away = folder
    if not folder.name.endswith(DISCARDED):
        away = discarded_name(folder)
        try:
            disk.rename(folder, away)
        except FileNotFoundError:
            return
        disk.sync_folder(away.parent)
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
