"""A disk that fails on purpose: the k-th operation is refused, or is the last one; what was not synced may be lost.

It counts every operation of `files.Disk` (a tree is removed file by file). Nothing is really synced, so that thousands
of runs are cheap; instead it remembers what a power loss may still take away:

    data      of a file that was not synced: cut to a prefix
    names     made, moved or removed in a folder that was not synced since: as they were before
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pekoe.pipeline import files

FILLING = ("create", "append", "write", "write_with", "make_folder")
"""The operations that a full disk refuses."""

Key = tuple[int, int]
"""Device and inode: what a file or folder is, whatever it is called."""


class Crash(BaseException):
    """The process is dead from here on: every later operation raises this too."""


@dataclass
class Fault:
    """What happens at operation `at` (from 0)."""

    at: int
    code: int = 0
    """The error that it gives; 0: the process dies in it."""
    happened: bool = False
    """The operation is carried out, and the error given nevertheless (an answer that got lost)."""
    lasting: bool = False
    """From then on the disk is full: operations that need room are refused until `mend`, others are not."""


@dataclass
class _Change:
    """A change of names that a power loss may undo until all of `folders` are synced."""

    folders: set[Key]
    undo: Callable[[], None]


@dataclass
class _Data:
    """A file's bytes beyond `synced` are not safe."""

    descriptor: int
    synced: int = 0


@dataclass
class Lateness:
    """A name is unknown to this node for its first `tries` looks, and for `seconds` from the first look on."""

    code: int
    tries: int = 0
    seconds: float = 0.0
    looks: dict[Path, tuple[int, float]] = field(default_factory=dict)

    def look(self, path: Path) -> None:
        """Raises OSError while the name is late."""
        count, since = self.looks.get(path, (0, time.monotonic()))
        self.looks[path] = (count + 1, since)
        if count < self.tries or time.monotonic() - since < self.seconds:
            raise OSError(self.code, os.strerror(self.code), str(path))


class UnsyncedDisk(files.Disk):
    """Healthy and quick: for what is done before and after the faults."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class FaultyDisk(files.Disk):
    """Put in place with `installed`. `graveyard` is a folder of the same filesystem, outside of what is tested."""

    def __init__(self, graveyard: Path, fault: Fault | None = None, late: Lateness | None = None) -> None:
        graveyard.mkdir(parents=True, exist_ok=True)
        self._graveyard = graveyard
        self._fault = fault
        self._late = late
        self._lock = threading.RLock()
        self._folders: dict[Key, int] = {}
        self._data: dict[Key, _Data] = {}
        self._changes: list[_Change] = []
        self._buried = 0
        self.dead = False
        self.operations: list[str] = []
        """What was asked for, in order; the numbers of faults are places in this list."""

    def mend(self) -> None:
        """A lasting fault ends."""
        self._fault = None

    def close(self) -> None:
        """Lets go of all handles."""
        for descriptor in [*self._folders.values(), *(data.descriptor for data in self._data.values())]:
            os.close(descriptor)
        self._folders, self._data = {}, {}

    @contextmanager
    def _operation(self, name: str, path: Path, half: Callable[[], object] = lambda: None) -> Iterator[None]:
        """The block carries the operation out; `half` does as much of it as a refusal or a crash may leave."""
        with self._lock:
            if self.dead:
                raise Crash(f"{name} {path} after the end")
            number = len(self.operations)
            self.operations.append(f"{name} {path.name}")
            fault = self._fault
            if fault is None or not _hits(fault, number, name):
                yield
                return
            if fault.code == 0:
                half()
                self.dead = True
                raise Crash(self.operations[-1])
            if fault.happened:
                yield
            else:
                half()
            raise OSError(fault.code, os.strerror(fault.code), str(path))

    def create(self, path: Path) -> BinaryIO:
        with self._operation("create", path):
            existed = path.exists()
            file = super().create(path)
            self._data[_key(path)] = _Data(os.dup(file.fileno()))
            if not existed:
                self._changed(path, lambda folder: os.unlink(path.name, dir_fd=folder))
        return file

    def append(self, path: Path) -> BinaryIO:
        with self._operation("append", path):
            existed = path.exists()
            file = super().append(path)
            self._data[_key(path)] = _Data(os.dup(file.fileno()), synced=path.stat().st_size)
            if not existed:
                self._changed(path, lambda folder: os.unlink(path.name, dir_fd=folder))
        return file

    def write(self, file: BinaryIO, data: Any) -> None:
        view = memoryview(data).cast("B")
        with self._operation("write", _path_of(file.fileno()), half=lambda: file.write(view[: len(view) // 2])):
            super().write(file, view)

    def write_with(self, path: Path, write: Callable[[Path], object]) -> None:
        def half() -> None:
            write(path)
            os.truncate(path, path.stat().st_size // 2)
            self._opened(path, existed)

        existed = path.exists()
        with self._operation("write_with", path, half):
            write(path)
            self._opened(path, existed)

    def _opened(self, path: Path, existed: bool) -> None:
        self._data[_key(path)] = _Data(os.open(path, os.O_RDWR))
        if not existed:
            self._changed(path, lambda folder: os.unlink(path.name, dir_fd=folder))

    def sync(self, descriptor: int) -> None:
        with self._operation("sync", _path_of(descriptor)):
            status = os.fstat(descriptor)
            if data := self._data.get((status.st_dev, status.st_ino)):
                data.synced = status.st_size

    def sync_folder(self, folder: Path) -> None:
        with self._operation("sync_folder", folder):
            key = _key(folder)
            for change in self._changes:
                change.folders.discard(key)
            self._changes = [change for change in self._changes if change.folders]

    def rename(self, old: Path, new: Path) -> None:
        with self._operation("rename", new):
            replaced = self._bury(new) if new.is_file() and old.exists() else None
            before, after = self._folder(old.parent), self._folder(new.parent)
            os.rename(old, new)

            def undo() -> None:
                os.rename(new.name, old.name, src_dir_fd=after, dst_dir_fd=before)
                if replaced:
                    os.rename(replaced, new.name, dst_dir_fd=after)

            self._changes.append(_Change({_key(old.parent), _key(new.parent)}, undo))

    def remove(self, path: Path) -> None:
        with self._operation("remove", path):
            buried = self._bury(path)
            os.unlink(path)
            self._changed(path, lambda folder: os.rename(buried, path.name, dst_dir_fd=folder))

    def remove_tree(self, folder: Path) -> None:
        """What cannot be removed stays, like everything above it. Lost contents stay lost, even if the folder's own
        move is undone."""
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir():
                self.remove_tree(path)
                continue
            with suppress(OSError), self._operation("remove_tree", path):
                os.unlink(path)
        with suppress(OSError), self._operation("remove_tree", folder):
            os.rmdir(folder)
            self._changed(folder, lambda parent: os.mkdir(folder.name, dir_fd=parent))

    def make_folder(self, folder: Path, mode: int = 0o777) -> None:
        with self._operation("make_folder", folder):
            existed = folder.is_dir()
            super().make_folder(folder, mode)
            if not existed:
                self._changed(folder, lambda parent: shutil.rmtree(folder.name, dir_fd=parent))

    def open(self, path: Path) -> int:
        with self._operation("open", path):
            self._look(path)
            return super().open(path)

    def read(self, path: Path) -> bytes:
        with self._operation("read", path):
            self._look(path)
            return super().read(path)

    def _look(self, path: Path) -> None:
        if self._late:
            self._late.look(path)

    def lose_power(self, seed: int) -> None:
        """Takes away what was not synced: everything with seed 0, else a part of it chosen by the seed."""
        rng = random.Random(seed)
        for data in self._data.values():
            size = os.fstat(data.descriptor).st_size
            if size > data.synced:
                os.ftruncate(data.descriptor, data.synced + (rng.randrange(size - data.synced) if seed else 0))
        first = rng.randrange(len(self._changes) + 1) if seed else 0
        for change in reversed(self._changes[first:]):
            # what it was in, or what it was of, may be gone for good
            with suppress(FileNotFoundError):
                change.undo()
        self._changes = []

    def _changed(self, path: Path, undo: Callable[[int], object]) -> None:
        parent = self._folder(path.parent)
        self._changes.append(_Change({_key(path.parent)}, lambda: (undo(parent), None)[1]))

    def _folder(self, folder: Path) -> int:
        """A handle that stays right when the folder gets another name."""
        key = _key(folder)
        if key not in self._folders:
            self._folders[key] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        return self._folders[key]

    def _bury(self, path: Path) -> Path:
        self._buried += 1
        buried = self._graveyard / str(self._buried)
        os.link(path, buried)
        return buried


@contextmanager
def installed(disk: files.Disk) -> Iterator[None]:
    """Everything durable goes through `disk` inside the block."""
    before = files.disk
    files.disk = disk
    try:
        yield
    finally:
        files.disk = before


def _hits(fault: Fault, number: int, name: str) -> bool:
    return number >= fault.at and name in FILLING if fault.lasting else number == fault.at


def _key(path: Path) -> Key:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
