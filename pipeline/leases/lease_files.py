"""Small files that are seen whole or not at all, and moves whose errors are settled by looking.

What lies in `leases/` need not survive the head: a later attempt throws it away. So nothing here is fsynced; notices
are (`files.write_bytes`), since the lease of what they tell is removed after them.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from pekoe.pipeline import files
from pekoe.pipeline.leases.lease_records import LeaseName

T = TypeVar("T")


def write_visible(path: Path, data: bytes) -> None:
    """A file appears, or is replaced, as a whole. OSError: under the name lies what was there before."""
    part = files.part_name(path)
    try:
        with files.disk.create(part) as file:
            files.disk.write(file, data)
    except OSError:
        with suppress(OSError):
            files.disk.remove(part)
        raise
    try:
        files.disk.rename(part, path)
    except OSError:
        if is_there(part):
            with suppress(OSError):
                files.disk.remove(part)
            raise
        if not is_there(path):
            raise


def move(old: Path, new: Path) -> bool:
    """True when `new` is there; False when `old` was gone. Raises only when `old` is still there, or looking fails."""
    try:
        files.disk.rename(old, new)
    except OSError:
        if is_there(new):
            return True
        if is_there(old):
            raise
        return False
    return True


def is_there(path: Path) -> bool:
    """Looks again for a moment when the handle is stale (ESTALE); other errors are raised."""
    for pause in (0.01, 0.05, 0.2):
        try:
            os.stat(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in files.LATE:
                raise
            time.sleep(pause)
            continue
        return True
    os.stat(path)
    return True


def names_in(folder: Path) -> list[str]:
    """Names in a folder, in no order; none when it is not there (or not yet seen).

    A folder that changes while it is listed may give a name twice: each comes once.
    """
    try:
        return list(dict.fromkeys(os.listdir(folder)))
    except OSError as error:
        if error.errno not in files.LATE:
            raise
        return []


def leases_in(folder: Path) -> list[LeaseName]:
    """What lies in a folder of leases, temporary files left out."""
    return [name for text in names_in(folder) if (name := LeaseName.parse(text))]


def read_record(path: Path, kind: type[T]) -> T | None:
    """The JSON record in a file; None when it is not there, cannot be seen now, or is damaged."""
    try:
        return msgspec.json.decode(files.read_bytes(path, retry_seconds=0.0), type=kind)
    except (msgspec.DecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in files.LATE:
            raise
        return None
