"""The directory of shards as its readers and its owner see it: read rows, put bad files aside, collect consumed ones.

Every trainer rank reads through its own store. Only the head puts aside and collects; a file that vanished meanwhile is
reported as bad rows, never a crash.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pekoe.pipeline import files
from pekoe.pipeline.messages import Published
from pekoe.pipeline.records import TEACHER_LOGPROBS, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.shard import NOT_THERE_YET, SUFFIX, BadShard, Shard

FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 0.5
VERIFYING_THREADS = 4
T = TypeVar("T")


class BadRows(Exception):
    """Rows that could not be read, each with its reason; no row of the call was handed out."""

    def __init__(self, rows: Sequence[tuple[str, int, str]]) -> None:
        shown = "; ".join(f"{shard} row {row}: {reason}" for shard, row, reason in rows[:3])
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        super().__init__(f"{len(rows)} rows cannot be read: {shown}{more}")
        self.rows = tuple(rows)
        """(shard, row, reason), as `RowsRead.bad` wants it."""


@dataclass(frozen=True)
class Adoptable:
    """What a resumed run finds on the disk."""

    notices: list[Published]
    """Whole shards with a group that is still open, in the order of their names."""
    spent: list[str]
    """Shards whose groups have all ended: to be collected or archived."""


class Store:
    """Shards of a run, by path relative to the run directory. Safe to call from any thread; one call at a time runs.

    `retry_seconds` bounds how long one `read` waits, in all, for names that are late on a network filesystem (ENOENT,
    ESTALE). At most `open_shards` files are kept open, so memory and handles are bounded. With a `temperature`, a shard
    whose log-probs are at another one is as bad as a damaged one: ratios over it would be biased. With `teacher` true,
    so is a shard without the log-probs of a teacher; with false they are left out where a shard has them.
    """

    def __init__(
        self, run: RunDirectory, *, open_shards: int = 16, retry_seconds: float = 5.0,
        temperature: float | None = None, teacher: bool | None = None,
    ) -> None:  # fmt: skip
        self._run = run
        self._teacher = teacher
        self._temperature = temperature
        self._open_shards = open_shards
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._shards: OrderedDict[str, Shard] = OrderedDict()
        self._process = os.getpid()
        self.num_quarantined = 0
        """Files put aside by this store."""

    def close(self) -> None:
        """Closes all files; the store can be used again."""
        with self._lock:
            for shard in self._shards.values():
                shard.close()
            self._shards.clear()

    def read(self, keys: Sequence[tuple[str, int]]) -> list[tuple[int, Trajectory]]:
        """(group number, trajectory) of each (shard, row), in the order asked; every byte verified.

        Raises BadRows naming all rows that cannot be read; then nothing is returned.
        """
        rows_by_shard: dict[str, list[int]] = {}
        for name, row in keys:
            rows_by_shard.setdefault(name, []).append(row)
        found: dict[tuple[str, int], tuple[int, Trajectory]] = {}
        bad: list[tuple[str, int, str]] = []
        deadline = time.monotonic() + self._retry_seconds
        self._start_anew_after_fork()
        with self._lock:
            for name, rows in rows_by_shard.items():
                try:
                    values = self._read_rows(name, rows, deadline)
                except (BadShard, OSError) as error:
                    reason = error.reason if isinstance(error, BadShard) else str(error)
                    bad.extend((name, row, reason) for row in rows)
                    continue
                found.update(zip(((name, row) for row in rows), values, strict=True))
        if bad:
            raise BadRows(bad)
        return [found[name, row] for name, row in keys]

    def _start_anew_after_fork(self) -> None:
        """A child opens its own files; its parent's lock may have been held by a thread that the child has not."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._lock = threading.Lock()
            self._shards.clear()

    def _read_rows(self, name: str, rows: Sequence[int], deadline: float) -> list[tuple[int, Trajectory]]:
        def read_once() -> list[tuple[int, Trajectory]]:
            try:
                found = self._opened(name).read(rows)
            except (BadShard, OSError):
                self._forget(name)
                raise
            if self._teacher is False:
                for _, trajectory in found:
                    trajectory.extra.pop(TEACHER_LOGPROBS, None)
            return found

        return _patiently(read_once, deadline)

    def _opened(self, name: str) -> Shard:
        """The open shard of this name; opened again when the file changed."""
        path = self._run.path / name
        shard = self._shards.get(name)
        if shard is not None:
            status = os.stat(path)
            if shard.identity == (status.st_ino, status.st_size, status.st_mtime_ns):
                self._shards.move_to_end(name)
                return shard
            self._forget(name)
        shard = self._shards[name] = Shard(path)
        found = shard.attributes.temperature
        if self._temperature is not None and found != self._temperature:
            raise BadShard(path, f"log-probs at temperature {found}, wanted gconfig.temperature {self._temperature}")
        if self._teacher and "teacher_logprob" not in shard.addresses:
            raise BadShard(path, "no log-probs of a teacher, which teacher.place: engine wants")
        if len(self._shards) > self._open_shards:
            self._forget(next(iter(self._shards)))
        return shard

    def _forget(self, name: str) -> None:
        shard = self._shards.pop(name, None)
        if shard is not None:
            shard.close()

    def paths(self) -> list[str]:
        """All published shards on the disk, in the order of their names."""
        return sorted(self._run.relative(path) for path in self._run.shards.glob(f"*/*{SUFFIX}"))

    def notice(self, name: str) -> Published:
        """The notice of a shard, made from the verified file; raises BadShard, or OSError when it is gone."""
        with Shard(self._run.path / name) as shard:
            return Published(path=name, groups=shard.verify())

    def adoptable(self, max_version: int, is_open: Callable[[int], bool]) -> Adoptable:
        """For resume from version `max_version`: which shards can be used, and which are of no use any more.

        `is_open` says whether a group (admission number) has not ended yet. A shard without such a group is not read
        beyond its group numbers. The others are verified, a few at a time; damaged ones and those with tokens newer
        than `max_version` are put aside. The caller drops groups that ended and takes the first per (group, try).
        """

        def look(name: str) -> Published | BadShard | None:
            deadline = time.monotonic() + self._retry_seconds
            try:
                return _patiently(lambda: self._notice_if_open(name, is_open), deadline)
            except BadShard as error:
                return error
            except FileNotFoundError:
                return BadShard(self._run.path / name, "vanished")

        found = Adoptable([], [])
        with ThreadPoolExecutor(VERIFYING_THREADS, "verify-shard") as pool:
            for name, outcome in zip(names := self.paths(), pool.map(look, names), strict=True):
                if outcome is None:
                    found.spent.append(name)
                elif isinstance(outcome, BadShard):
                    self.quarantine(name, outcome.reason)
                elif (newest := _newest_version(outcome)) > max_version:
                    reason = f"has tokens of version {newest}, the run goes on from version {max_version}"
                    self._put_aside(name, reason)
                else:
                    found.notices.append(outcome)
        return found

    def _notice_if_open(self, name: str, is_open: Callable[[int], bool]) -> Published | None:
        with Shard(self._run.path / name) as shard:
            if not any(is_open(group) for group in set(shard.group_numbers())):
                return None
            return Published(path=name, groups=shard.verify())

    def quarantine(self, name: str, reason: str) -> bool:
        """Moves a bad shard to the set-aside folder with its reason and counts it; False when it was gone already."""
        moved = self._put_aside(name, reason)
        self.num_quarantined += moved
        return moved

    def _put_aside(self, name: str, reason: str) -> bool:
        with self._lock:
            self._forget(name)
        return self._run.put_aside(self._run.path / name, reason) is not None

    def collect(self, names: Iterable[str]) -> int:
        """Deletes shards whose groups have all ended in the ledger of a complete checkpoint; gives their number."""
        count = 0
        for name in names:
            with self._lock:
                self._forget(name)
            count += files.remove(self._run.path / name)
        return count

    def set_aside_unknown(self, attempt: int, keep: Iterable[str]) -> list[str]:
        """For resume, before `attempt` writes: puts aside what earlier attempts left and `keep` does not name.

        Temporary files are deleted, empty folders removed. Files of `attempt` or later ones are not touched.
        """
        kept = set(keep)
        moved = []
        for folder in sorted(path for path in self._run.shards.iterdir() if path.is_dir()):
            if _attempt_of(folder) >= attempt:
                continue
            for path in sorted(folder.iterdir()):
                name = self._run.relative(path)
                if path.name.endswith(files.PART):
                    files.remove(path)
                elif name not in kept and self._put_aside(
                    name, f"left by an earlier attempt, not adopted by attempt {attempt}"
                ):
                    moved.append(name)
            if not any(folder.iterdir()):
                folder.rmdir()
        return moved


def _patiently(attempt: Callable[[], T], deadline: float) -> T:
    """Tries again while a network filesystem is late; raises the last OSError at the deadline, others at once."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return attempt()
        except OSError as error:
            if error.errno not in NOT_THERE_YET or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _newest_version(notice: Published) -> int:
    return max(row.max_version for group in notice.groups for row in group.rows)


def _attempt_of(folder: Path) -> int:
    """Attempt number of a writer's folder (`<attempt>-<writer>`); -1 for a name of another form."""
    number = folder.name.partition("-")[0]
    return int(number) if number.isdigit() else -1
