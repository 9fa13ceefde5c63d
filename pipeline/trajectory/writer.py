"""The writer of one rollout rank (or of one node): collects finished groups and publishes shards in its own folder."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.messages import Published
from pekoe.pipeline.records import Group
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import SUFFIX, Written, write_shard

MAX_ROWS = 16_384
"""Rows of one shard: keeps its notice under the limit of a control message (1 MiB)."""
MAX_TOKENS = 16 * 1024 * 1024
"""Tokens of one shard (about 17 bytes each): bounds the memory of the writer."""


class ShardWriter:
    """Open shard in memory, published by `flush`. All methods may be called from any thread.

    Who waits for whom: `add` never waits for the disk; `flush` does, and one flush waits for another. When the disk
    refuses, `flush` raises OSError and keeps the groups, so that nothing is lost and nothing is half visible.
    """

    def __init__(
        self, run: RunDirectory, attributes: ShardAttributes, *, max_groups: int = 256, max_seconds: float = 30.0
    ) -> None:
        self._run = run
        self._attributes = attributes
        self._max_groups = max_groups
        self._max_seconds = max_seconds
        self._folder = run.shards / f"{attributes.attempt}-{attributes.writer}"
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._groups: list[Group] = []
        self._opened = 0.0
        self._next_number = self._first_free_number()

    def _first_free_number(self) -> int:
        taken = [int(path.name.split(".")[0]) for path in self._folder.glob(f"*{SUFFIX}*")]
        return max(taken, default=-1) + 1

    def add(self, group: Group) -> None:
        """Puts a group into the open shard; raises ValueError when it has no trajectory or an unsound one."""
        if not group.trajectories:
            raise ValueError(f"group {group.number}: no trajectory")
        for trajectory in group.trajectories:
            trajectory.check()
        with self._lock:
            if not self._groups:
                self._opened = time.monotonic()
            self._groups.append(group)

    def due(self) -> bool:
        """True when the open shard is full or old enough to be published unasked."""
        with self._lock:
            if not self._groups:
                return False
            lengths = [len(t.tokens) for group in self._groups for t in group.trajectories]
            full = len(self._groups) >= self._max_groups or len(lengths) >= MAX_ROWS or sum(lengths) >= MAX_TOKENS
            return full or time.monotonic() - self._opened >= self._max_seconds

    @property
    def num_groups(self) -> int:
        """Groups in the open shard."""
        with self._lock:
            return len(self._groups)

    def flush(self) -> Published | None:
        """Publishes the open shard; None when it is empty. Raises OSError naming the file when the disk refuses.

        What has come together while the disk refused may be more than a shard can hold: the rest is due at once.
        """
        with self._flush_lock:
            with self._lock:
                end = _fitting(self._groups)
                groups, self._groups = self._groups[:end], self._groups[end:]
                if self._groups:
                    self._opened = -math.inf
            if not groups:
                return None
            path = self._free_path()
            try:
                written = self._write(path, groups)
            except BaseException:
                with self._lock:
                    self._groups = groups + self._groups
                raise
            self._next_number += 1
            return Published(path=self._run.relative(path), groups=written.groups)

    def _free_path(self) -> Path:
        """A name that no shard has: not even one whose publication failed after it had become visible."""
        while (path := self._folder / f"{self._next_number:06d}{SUFFIX}").exists():
            self._next_number += 1
        return path

    def _write(self, path: Path, groups: list[Group]) -> Written:
        try:
            if not self._folder.is_dir():
                self._folder.mkdir(exist_ok=True)
                files.fsync_folder(self._folder.parent)
            return write_shard(path, groups, self._attributes)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot publish a shard of {len(groups)} groups: {error.strerror}", str(path)
            ) from error


def _fitting(groups: Sequence[Group]) -> int:
    """How many of the first groups one shard holds: up to the one that makes it full; all, nearly always."""
    num_rows = num_tokens = 0
    for index, group in enumerate(groups):
        if num_rows >= MAX_ROWS or num_tokens >= MAX_TOKENS:
            return index
        num_rows += len(group.trajectories)
        num_tokens += sum(len(trajectory.tokens) for trajectory in group.trajectories)
    return len(groups)
