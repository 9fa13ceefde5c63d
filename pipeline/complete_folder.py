"""A folder of files that counts only as a whole: a marker, written last, lists every file with its size and hash.

Written as NAME.part, sealed, then renamed, so that a folder under its final name is complete unless a filesystem lost
something; whoever opens one compares it with its marker first.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import time
from pathlib import Path
from typing import Any

from pekoe.pipeline import files

MARKER = "COMPLETE.json"
BLOCK_BYTES = 1 << 22


class IncompleteFolderError(RuntimeError):
    """The folder is not what its marker says, or has none."""


def seal(folder: Path, facts: dict[str, Any], hashed: bool = True) -> None:
    """Makes every file below `folder` durable, then writes the marker with `facts` and, per file, size and BLAKE2b
    hash.

    Call it when all writers are done. `hashed=False` records sizes only: a pass over the bytes less.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name != MARKER]
    for name in names:
        files.fsync_file(folder / name)
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            files.fsync_folder(path)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(lambda name: file_hash(folder / name) if hashed else "", names))
    listed = [
        {"name": name, "bytes": (folder / name).stat().st_size, "blake2b": digest}
        for name, digest in zip(names, hashes, strict=True)
    ]
    files.write_json(folder / MARKER, {**facts, "files": listed})


def verify(folder: Path, deep: bool = False, retry_seconds: float = 0.0) -> dict[str, Any]:
    """The marker's content, once the folder agrees with it; raises IncompleteFolderError with the reason.

    Names and sizes always, hashes when `deep`. What is missing or short is looked at again for `retry_seconds`: another
    node's files may come into view late.
    """
    deadline = time.monotonic() + retry_seconds
    pause = 0.02
    while True:
        try:
            return _verify(folder, deep)
        except IncompleteFolderError:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 2, 1.0)


def file_hash(path: Path) -> str:
    """BLAKE2b (32 hex digits) of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _verify(folder: Path, deep: bool) -> dict[str, Any]:
    try:
        marker = files.read_json(folder / MARKER, retry_seconds=0.0)
        listed = [(str(entry["name"]), int(entry["bytes"]), str(entry["blake2b"])) for entry in marker["files"]]
    except FileNotFoundError as error:
        raise IncompleteFolderError(f"{folder}: has no {MARKER}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise IncompleteFolderError(f"{folder}: {MARKER} is damaged: {error}") from error
    except OSError as error:
        raise IncompleteFolderError(f"{folder}: {MARKER} cannot be read: {error}") from error
    for name, size, digest in listed:
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            if not isinstance(error, NotADirectoryError) and error.errno not in files.LATE:
                raise
            raise IncompleteFolderError(f"{folder}: {name} is missing") from error
        if found != size:
            raise IncompleteFolderError(f"{folder}: {name} has {found} bytes, {size} were written")
        if deep and digest and file_hash(folder / name) != digest:
            raise IncompleteFolderError(f"{folder}: {name} differs from what was written")
    content: dict[str, Any] = marker
    return content
