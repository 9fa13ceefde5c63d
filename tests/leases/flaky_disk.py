"""A disk that refuses operations at random, before or after it has carried them out."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from faulty_disk import UnsyncedDisk

CODES = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ENOENT, errno.EEXIST)
"""ENOENT and EEXIST: what a client says of a rename or unlink whose first answer got lost."""


class FlakyDisk(UnsyncedDisk):
    """While `share` is above 0, so many of all operations fail."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.share = 0.0
        self.num_failed = 0

    def _perhaps(self, path: Path, act: Callable[[], None]) -> None:
        if self.random.random() >= self.share:
            act()
            return
        self.num_failed += 1
        if self.random.random() < 0.5:
            act()
        code = self.random.choice(CODES)
        raise OSError(code, os.strerror(code), str(path))

    def create(self, path: Path) -> BinaryIO:
        if self.random.random() < self.share / 2:
            raise OSError(errno.ENOSPC, "no room", str(path))
        return super().create(path)

    def write(self, file: BinaryIO, data: Any) -> None:
        if self.random.random() < self.share:
            super().write(file, memoryview(data).cast("B")[:3])
            raise OSError(errno.ENOSPC, "no room")
        super().write(file, data)

    def rename(self, old: Path, new: Path) -> None:
        self._perhaps(new, lambda: os.rename(old, new))

    def remove(self, path: Path) -> None:
        self._perhaps(path, lambda: os.unlink(path))

    def read(self, path: Path) -> bytes:
        if self.random.random() < self.share:
            raise OSError(self.random.choice((errno.ESTALE, errno.EIO)), "stale", str(path))
        return super().read(path)
