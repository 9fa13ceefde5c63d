"""A folder of files that counts only as a whole: a marker, written last, lists every file with its size and hash.

Written as NAME.part, sealed, then renamed, so that a folder under its final name is complete unless a filesystem lost
something; whoever opens one compares it with its marker first. Many ranks may write into one folder: each reports what
it saw going out (`WrittenFile`), and no byte is read again to seal it.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pekoe.pipeline import files
from pekoe.pipeline.messages import WrittenFile

T = TypeVar("T")
R = TypeVar("R")

MARKER = "COMPLETE.json"
BLOCK_BYTES = 1 << 22
MAX_THREADS = 8
MAX_NAMED = 3
"""Names of files that one reason lists."""


class IncompleteFolderError(RuntimeError):
    """The folder is not what its marker says, or has none."""


def seal(folder: Path, facts: dict[str, Any], hashed: bool = True) -> None:
    """For a folder of one writer: makes every file below it durable, reads it again for its hash (`hashed=False`
    records sizes only), then writes the marker with `facts`."""
    names = _names_below(folder)
    for name in names:
        files.fsync_file(folder / name)
    sizes = _on_threads(lambda name: (folder / name).stat().st_size, names)
    hashes = _on_threads(lambda name: file_hash(folder / name) if hashed else "", names)
    _write_marker(folder, facts, [WrittenFile(*entry) for entry in zip(names, sizes, hashes, strict=True)])


def seal_written(
    folder: Path, facts: dict[str, Any], written: Sequence[WrittenFile], retry_seconds: float = 0.0
) -> None:
    """For a folder of many writers, when all are done and their files durable: writes the marker with `facts` and what
    the writers reported.

    Raises IncompleteFolderError unless exactly the reported files lie there, with the reported sizes; what is missing
    or short is looked at again for `retry_seconds` (another node's file may come into view late).
    """
    written = sorted(written, key=lambda file: file.name)
    names = [file.name for file in written]
    twice = sorted({name for name, following in itertools.pairwise(names) if name == following})
    if not names or twice:
        raise IncompleteFolderError(f"{folder}: {_some(twice)} reported twice" if twice else f"{folder}: no files")
    _try_again(lambda: _compare_sizes(folder, written), retry_seconds)
    if surplus := sorted(set(_names_below(folder)) - set(names)):
        raise IncompleteFolderError(f"{folder}: {_some(surplus)} reported by nobody")
    _write_marker(folder, facts, written)


def verify(folder: Path, deep: bool = False, retry_seconds: float = 0.0) -> dict[str, Any]:
    """The marker's content, once the folder agrees with it; raises IncompleteFolderError with the reason.

    Names and sizes always, hashes when `deep`. What is missing or short is looked at again for `retry_seconds`: another
    node's files may come into view late.
    """

    def compare() -> dict[str, Any]:
        marker = read_marker(folder)
        _compare_sizes(folder, listed_files(marker))
        return marker

    marker = _try_again(compare, retry_seconds)
    if deep:
        for problem in hash_problems(folder, listed_files(marker)):
            raise IncompleteFolderError(f"{folder}: {problem}")
    return marker


def verify_share(folder: Path, index: int, count: int, retry_seconds: float = 60.0) -> list[str]:
    """What is wrong with this rank's share (the `index`-th of `count`) of a folder's files, hashes compared; bounded in
    number and length. Together `count` ranks read every byte once."""
    try:
        by_size = sorted(listed_files(read_marker(folder, retry_seconds)), key=_largest_first)
        share = by_size[index::count]
        _try_again(lambda: _compare_sizes(folder, share), retry_seconds)
    except IncompleteFolderError as error:
        return [str(error)]
    return [f"{folder}: {problem}" for problem in hash_problems(folder, share)][:MAX_NAMED]


def read_marker(folder: Path, retry_seconds: float = 0.0) -> dict[str, Any]:
    """The marker's content, checked for its form; raises IncompleteFolderError."""
    return _try_again(lambda: _read_marker(folder), retry_seconds)


def _read_marker(folder: Path) -> dict[str, Any]:
    try:
        marker = files.read_json(folder / MARKER, retry_seconds=0.0)
        listed_files(marker)
    except FileNotFoundError as error:
        raise IncompleteFolderError(f"{folder}: has no {MARKER}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise IncompleteFolderError(f"{folder}: {MARKER} is damaged: {error}") from error
    except OSError as error:
        raise IncompleteFolderError(f"{folder}: {MARKER} cannot be read: {error}") from error
    content: dict[str, Any] = marker
    return content


def listed_files(marker: dict[str, Any]) -> list[WrittenFile]:
    """The files that a marker lists; an empty hash means that none was recorded."""
    return [WrittenFile(str(entry["name"]), int(entry["bytes"]), str(entry["blake2b"])) for entry in marker["files"]]


def file_hash(path: Path) -> str:
    """BLAKE2b (32 hex digits) of a file's bytes."""
    digest = hashlib.blake2b(digest_size=files.DIGEST_BYTES)
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def hash_problems(folder: Path, listed: Sequence[WrittenFile]) -> list[str]:
    """One reason for each file whose bytes are not those that were written, or cannot be read."""

    def problem(file: WrittenFile) -> str:
        try:
            same = not file.blake2b or file_hash(folder / file.name) == file.blake2b
        except OSError as error:
            return f"{file.name} cannot be read: {error}"
        return "" if same else f"{file.name} differs from what was written"

    return [found for found in _on_threads(problem, listed) if found]


def _compare_sizes(folder: Path, listed: Sequence[WrittenFile]) -> None:
    def problem(file: WrittenFile) -> str:
        try:
            found = (folder / file.name).stat().st_size
        except OSError as error:
            is_missing = isinstance(error, NotADirectoryError) or error.errno in files.LATE
            return f"{file.name} is missing" if is_missing else f"{file.name} cannot be read: {error}"
        return "" if found == file.num_bytes else f"{file.name} has {found} bytes, {file.num_bytes} were written"

    problems = [found for found in _on_threads(problem, listed) if found]
    if problems:
        raise IncompleteFolderError(f"{folder}: {_some(problems)}")


def _write_marker(folder: Path, facts: dict[str, Any], written: Iterable[WrittenFile]) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            files.fsync_folder(path)
    listed = [{"name": file.name, "bytes": file.num_bytes, "blake2b": file.blake2b} for file in written]
    files.write_json(folder / MARKER, {**facts, "files": listed})


def _names_below(folder: Path) -> list[str]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [name for name in names if name != MARKER]


def _try_again(look: Callable[[], R], seconds: float) -> R:
    deadline = time.monotonic() + seconds
    pause = 0.02
    while True:
        try:
            return look()
        except IncompleteFolderError:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 2, 1.0)


def _on_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """In order; many small waits for a filesystem overlap."""
    if len(items) < 2:
        return [work(item) for item in items]
    with concurrent.futures.ThreadPoolExecutor(min(MAX_THREADS, len(items), 2 * (os.cpu_count() or 1))) as pool:
        return list(pool.map(work, items))


def _largest_first(file: WrittenFile) -> tuple[int, str]:
    return -file.num_bytes, file.name


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
