"""What a shared filesystem really does between two nodes, measured: names, renames, claims, locks, clocks, room.

Two ranks work on a folder of their own under `cluster.fileroot` (`Pair`); every exercise is bounded in time, and the
folder is removed at the end. What the figures mean is said in `filesystem_check`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pekoe.launch.doctor.rank_pair import WRITER, Done, Pair, attempt, seconds_until
from pekoe.pipeline import files

VISIBLE_SECONDS = 6.0
"""A name that the other node has not seen by then counts as never seen."""
ROUNDS = 3
CLAIMS = 40
REPLACE_SECONDS = 0.8
SMALL_FILES, SMALL_SECONDS = 40, 2.0
BULK_BYTES = 16 << 20
RECORD_BYTES = 4096


class FilesystemFacts(msgspec.Struct):
    """Seconds, counts and names of errors; None: was not tried, or did not happen within its time."""

    root: str
    writer: str
    watcher: str
    """Hosts of the two ranks."""
    error: str = ""
    """What could not be tried, and why."""
    kind: str = ""
    """`lustre`, `nfs4`, …, as the kernel calls it."""
    mode: str = ""
    """Permissions of a folder that was made with 0700."""
    folder_seconds: float | None = None
    name_seconds: float | None = None
    """Worst delay until a renamed file was seen whole where its absence had been seen before."""
    whole: bool = True
    """Each file that was seen had all of its content."""
    list_seconds: float | None = None
    replaced_seconds: float | None = None
    reads: int = 0
    torn: int = 0
    """Reads of a replaced file that gave neither the old nor the new content."""
    missing: int = 0
    """… that found no file."""
    stale: int = 0
    """… that ended with ESTALE."""
    sync_folder: str = ""
    """Error of fsync on a folder."""
    exclusive_twice: int = 0
    """Names that both ranks made with O_EXCL."""
    exclusive_lost: int = 0
    """Names that neither did."""
    claimed_twice: int = 0
    """Files that both ranks took by rename."""
    claimed_lost: int = 0
    locks: dict[str, str] = {}
    """flock and fcntl: `excludes`, `pretends`, or the error."""
    shard: str = ""
    """What was wrong with a shard (HDF5, locking off) written on one node and read on the other."""
    skew: dict[str, float] = {}
    """Host -> its clock less the writer's, seconds."""
    skew_error: float = 0.0
    server_skew: float | None = None
    """Clock of the file server (mtime) less the writer's."""
    free_bytes: int = 0
    free_files: int | None = None
    """None: this filesystem counts no inodes."""
    quota: str = ""
    """What the filesystem's quota command says."""
    bulk_error: str = ""
    bulk_bytes_per_second: float | None = None
    small_files_per_second: float | None = None


def exercise(pair: Pair, root: Path, folder: Path, hosts: list[str]) -> FilesystemFacts:
    """All exercises, on every rank; all ranks get the facts. `folder` must not be there yet."""
    facts = FilesystemFacts(str(root), hosts[0], hosts[pair.watcher])
    facts.kind = pair.writer_does(lambda: filesystem_kind(root)).value or ""
    pair.watcher_does(lambda: folder.exists())
    made = pair.writer_does(lambda: _make(folder))
    facts.error, facts.mode = made.error, made.value or ""
    if made.error:
        return facts
    try:
        facts.folder_seconds = pair.watcher_does(lambda: seconds_until(folder.is_dir, VISIBLE_SECONDS)).value
        _clocks(pair, facts, folder, hosts)
        _room(pair, facts, folder)
        if facts.folder_seconds is not None and not facts.bulk_error:
            _names(pair, facts, folder)
            _replacing(pair, facts, folder / "pointer")
            _claims(pair, facts, folder)
            _locks(pair, facts, folder / "lock")
            _shard(pair, facts, folder / "trial.h5")
    finally:
        pair.writer_does(lambda: files.put_away(folder))
    return facts


def filesystem_kind(path: Path) -> str:
    """The type of the mount that holds the path."""
    best = ("", "")
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, point, kind, *_ = line.split()
            point = point.replace("\\040", " ")
            if len(point) >= len(best[0]) and path.resolve().is_relative_to(point):
                best = (point, kind)
    return best[1]


def _make(folder: Path) -> str:
    files.make_folder(folder, 0o700)
    return oct(folder.stat().st_mode & 0o777)


def _names(pair: Pair, facts: FilesystemFacts, folder: Path) -> None:
    """A new name appears: alone, and in a listing."""
    content = os.urandom(RECORD_BYTES)
    for number in range(ROUNDS):
        path = folder / f"new-{number}"
        pair.watcher_does(path.exists)
        pair.writer_does(partial(files.write_bytes, path, content))
        seen = pair.watcher_does(partial(_seen, path))
        if seen.value is None:
            facts.name_seconds = None
            return
        facts.name_seconds = max(facts.name_seconds or 0.0, seen.value[0])
        facts.whole = facts.whole and seen.value[1] == RECORD_BYTES
    listed = folder / "listed"
    pair.writer_does(lambda: files.make_folder(listed))
    pair.watcher_does(lambda: seconds_until(listed.is_dir, VISIBLE_SECONDS) is not None and len(os.listdir(listed)))
    pair.writer_does(lambda: _write_all([listed / str(number) for number in range(ROUNDS)]))
    done = pair.watcher_does(lambda: seconds_until(lambda: len(os.listdir(listed)) == ROUNDS, VISIBLE_SECONDS))
    facts.list_seconds = done.value
    facts.sync_folder = pair.writer_does(lambda: _sync_folder(listed)).code


def _write_all(paths: Sequence[Path]) -> None:
    for path in paths:
        files.write_bytes(path, b"trial")


def _sync_folder(folder: Path) -> None:
    """Raises what the layer of `files` accepts."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seen(path: Path) -> tuple[float, int] | None:
    """(seconds, bytes) of a file that is about to appear."""
    took = seconds_until(path.exists, VISIBLE_SECONDS)
    return None if took is None else (took, len(path.read_bytes()))


def _replacing(pair: Pair, facts: FilesystemFacts, path: Path) -> None:
    """One rank replaces a small file again and again, the other reads it."""
    pair.writer_does(lambda: files.write_bytes(path, _record(0)))
    pair.watcher_does(lambda: seconds_until(path.exists, VISIBLE_SECONDS))
    wrote, read = pair.together(lambda: _replace(path), lambda: _read_replaced(path))
    if wrote.error or read.error:
        facts.error = wrote.error or read.error
        return
    last = _record(int(wrote.value))
    facts.reads, facts.torn, facts.missing, facts.stale = read.value
    late = pair.watcher_does(lambda: seconds_until(lambda: _content(path) == last, VISIBLE_SECONDS))
    facts.replaced_seconds = late.value


def _record(number: int) -> bytes:
    body = f"{number:016d}".encode() * (RECORD_BYTES // 16)
    return body + hashlib.blake2b(body, digest_size=16).digest()


def _replace(path: Path) -> int:
    end, number = time.monotonic() + REPLACE_SECONDS, 0
    while time.monotonic() < end:
        number += 1
        files.write_bytes(path, _record(number))
    return number


def _read_replaced(path: Path) -> list[int]:
    """Reads, torn, missing, stale."""
    end = time.monotonic() + REPLACE_SECONDS
    counts = [0, 0, 0, 0]
    while time.monotonic() < end:
        counts[0] += 1
        found = _content(path)
        if isinstance(found, bytes):
            whole = hashlib.blake2b(found[:-16], digest_size=16).digest() == found[-16:]
            counts[1] += not whole
        else:
            counts[2 if found == "ENOENT" else 3] += 1
    return counts


def _content(path: Path) -> bytes | str:
    """The bytes, or the name of the error."""
    done = attempt(path.read_bytes)
    return done.code if done.error else bytes(done.value)


def _claims(pair: Pair, facts: FilesystemFacts, folder: Path) -> None:
    """Both ranks want the same names at the same time: by exclusive creation, and by rename."""
    names = [folder / f"exclusive-{n}" for n in range(CLAIMS)]
    first, second = pair.together(lambda: _create(names), lambda: _create(names))
    facts.exclusive_twice, facts.exclusive_lost = _conflicts(first, second)
    offered = [folder / f"offered-{n}" for n in range(CLAIMS)]
    pair.writer_does(lambda: _write_all(offered))
    pair.watcher_does(lambda: seconds_until(lambda: all(path.exists() for path in offered), VISIBLE_SECONDS))
    first, second = pair.together(lambda: _take(offered, "writer"), lambda: _take(offered, "watcher"))
    facts.claimed_twice, facts.claimed_lost = _conflicts(first, second)


def _create(names: list[Path]) -> list[int]:
    """Numbers of the names that this rank made."""
    made = []
    for number, path in enumerate(names):
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            made.append(number)
    return made


def _take(offered: list[Path], who: str) -> list[int]:
    """Numbers of the files that this rank renamed to a name of its own, and then found there."""
    taken = []
    for number, path in enumerate(offered):
        mine = path.with_name(f"{path.name}-{who}")
        with suppress(OSError):
            files.disk.rename(path, mine)
        if mine.exists():
            taken.append(number)
    return taken


def _conflicts(first: Done, second: Done) -> tuple[int, int]:
    """(names that both got, names that nobody got)."""
    ours, theirs = set(first.value or ()), set(second.value or ())
    return len(ours & theirs), CLAIMS - len(ours | theirs)


LOCKS: dict[str, Callable[[Any, int], None]] = {"flock": fcntl.flock, "fcntl": fcntl.lockf}


def _locks(pair: Pair, facts: FilesystemFacts, path: Path) -> None:
    """Does a lock that one rank holds keep the other out?"""
    pair.writer_does(lambda: files.write_bytes(path, b"lock"))
    pair.watcher_does(lambda: seconds_until(path.exists, VISIBLE_SECONDS))
    takes_part = pair.peers.rank in (WRITER, pair.watcher)
    with files.disk.append(path) if takes_part else nullcontext() as file:
        for name, lock in LOCKS.items():
            take, leave = partial(lock, file, fcntl.LOCK_EX | fcntl.LOCK_NB), partial(lock, file, fcntl.LOCK_UN)
            held = pair.writer_does(take)
            tried = pair.watcher_does(take)
            if not tried.error:
                pair.watcher_does(leave)
            if held.error:
                facts.locks[name] = held.error
                continue
            pair.writer_does(leave)
            excluded = tried.code in ("EAGAIN", "EACCES")
            facts.locks[name] = "excludes" if excluded else (tried.error or "pretends")


def _shard(pair: Pair, facts: FilesystemFacts, path: Path) -> None:
    """A real shard, written by one rank and verified by the other."""
    from pekoe.launch.doctor.trial_shard import read_trial_shard, write_trial_shard

    wrote = pair.writer_does(lambda: write_trial_shard(path))
    pair.watcher_does(lambda: seconds_until(path.exists, VISIBLE_SECONDS))
    read = pair.watcher_does(lambda: read_trial_shard(path))
    facts.shard = wrote.error or read.error or ("" if wrote.value == read.value else "other tokens than were written")


def _clocks(pair: Pair, facts: FilesystemFacts, folder: Path, hosts: list[str]) -> None:
    """Clocks of all ranks, read at about the same time; the quickest of a few rounds counts."""
    best = float("inf")
    for _ in range(5):
        pair.peers.collect(None)
        began = time.monotonic()
        clocks = pair.peers.collect(time.time())
        took = pair.peers.share(time.monotonic() - began)
        if took < best:
            best = took
            first = {host: hosts.index(host) for host in hosts}
            facts.skew = {host: clocks[rank] - clocks[0] for host, rank in first.items()}
    facts.skew_error = best
    facts.server_skew = pair.writer_does(lambda: _server_skew(folder / "clock")).value


def _server_skew(path: Path) -> float:
    before = time.time()
    files.write_bytes(path, socket.gethostname().encode())
    after, stamp = time.time(), path.stat().st_mtime
    nearest = min(max(stamp, before - 0.05), after)
    return stamp - nearest


def _room(pair: Pair, facts: FilesystemFacts, folder: Path) -> None:
    """Free room, as the filesystem and its quota say, and as a real write finds it."""
    from pekoe.launch.doctor.quota import quota_words

    said = pair.writer_does(lambda: _free(folder))
    facts.free_bytes, facts.free_files = said.value or (0, None)
    facts.quota = pair.writer_does(lambda: quota_words(folder, facts.kind)).value or ""
    bulk = pair.writer_does(lambda: _write_bulk(folder / "bulk"))
    facts.bulk_error = bulk.error
    if not bulk.error:
        facts.bulk_bytes_per_second = BULK_BYTES / max(bulk.value, 1e-9)
        small = pair.writer_does(lambda: _small_rate(folder))
        facts.small_files_per_second, facts.bulk_error = small.value, small.error


def _free(folder: Path) -> tuple[int, int | None]:
    """Bytes and inodes for this user; None where inodes are not counted."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None


def _write_bulk(path: Path) -> float:
    """Seconds for the bytes to be on the disk."""
    block = os.urandom(1 << 20)
    began = time.monotonic()
    try:
        with files.create(path) as file:
            for _ in range(BULK_BYTES // len(block)):
                file.write(block)
        return time.monotonic() - began
    finally:
        files.remove(path)


def _small_rate(folder: Path) -> float:
    """Small files a second, each written and published durably, as shards and records are."""
    began, count = time.monotonic(), 0
    while count < SMALL_FILES and time.monotonic() - began < SMALL_SECONDS:
        files.write_bytes(folder / f"small-{count}", b"x" * 512)
        count += 1
    return count / (time.monotonic() - began)
