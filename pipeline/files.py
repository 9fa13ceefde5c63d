"""The thin layer that takes every durable write (shards, ledger, checkpoints, pointers): one place to inject faults.

A file appears whole or not at all: temporary name in the same folder, fsync, rename, fsync of the folder. Nothing here
locks: on shared filesystems locks may lie.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

PART = ".part"


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Makes names in the folder durable; filesystems that refuse it (EINVAL) are accepted."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def part_name(final: Path) -> Path:
    """The temporary name under which `final` is written, in the same folder."""
    return final.with_name(f"{final.name}.{os.getpid()}{PART}")


def publish(part: Path, final: Path) -> None:
    """Makes a closed temporary file (or folder) visible under its final name, durably."""
    if part.is_file():
        fsync_file(part)
    os.rename(part, final)
    fsync_folder(final.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a small file atomically and durably; on failure only the temporary file is removed."""
    part = part_name(path)
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of readable JSON."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def read_bytes(path: Path, retry_seconds: float = 5.0) -> bytes:
    """Reads a small file; ENOENT and ESTALE (late names and handles of a network filesystem) are tried again."""
    deadline = time.monotonic() + retry_seconds
    pause = 0.01
    while True:
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 2, 0.5)


def read_json(path: Path, retry_seconds: float = 5.0) -> Any:
    return json.loads(read_bytes(path, retry_seconds))
