"""The archive: shards whose groups have all ended, put together into few large files of the same schema.

    head ── add(names) ─► list of names ─► background thread: enough bytes? ─► archive/NNNNNN.h5 ─► originals deleted

Each file names the shards that it holds and which rows came from which. It is durable before an original goes, and an
original that an archive names already is only deleted: a crash at any instant loses nothing and doubles nothing.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory import schema
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.sealed_file import BrokenSeal, SealedFile, publish_sealed
from pekoe.pipeline.trajectory.shard import (
    NOT_THERE_YET,
    SUFFIX,
    BadShard,
    Shard,
    SourceRows,
    read_columns,
    shard_layout,
)

logger = logging.getLogger(__name__)

WRITER = "archive"
"""Name of the writer in the attributes of an archive."""
PIECE_TOKENS = 1 << 20
"""Tokens of one column that are in memory at a time."""
MOST_SOURCES = 4096
"""Shards in one file: bounds what is remembered of them while it is written."""
RETRY_SECONDS = 60.0
UNWEIGHED = -1
"""In place of a size: whether an archive holds the shard already, and how large it is, is still to be looked up."""


@dataclass(frozen=True)
class Source:
    """What is remembered of a shard between the look at it and the copy of its columns."""

    name: str
    path: Path
    digest: str
    addresses: dict[str, int]
    attributes: ShardAttributes
    numbers: schema.Columns
    texts: dict[str, list[bytes]]

    @property
    def num_rows(self) -> int:
        return len(self.numbers["group"])

    @property
    def num_tokens(self) -> int:
        return int(self.numbers["offset"][-1])


class Archive:
    """Archives of a run, made by the head. Methods may be called from any thread.

    Who waits for whom: `add` never waits; `flush` waits for the background thread. A disk that refuses (full or
    otherwise) costs nothing: the originals stay, a warning is logged, and it is tried again after `retry_seconds`.
    Memory is bounded whatever `target_bytes`: columns pass through in pieces, only numbers and texts are held.
    """

    def __init__(
        self, run: RunDirectory, target_bytes: int = 256 * 1024 * 1024, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._run = run
        self._target_bytes = target_bytes
        self._retry_seconds = retry_seconds
        self._changed = threading.Condition()
        self._waiting: dict[str, int] = {}
        self._flushing = False
        self._closing = False
        self._not_before = 0.0
        self._held: dict[str, str] | None = None
        self._thread: threading.Thread | None = None

    def add(self, names: Iterable[str]) -> None:
        """Spent shards, by path relative to the run directory; they lie there until an archive holds them."""
        with self._changed:
            for name in names:
                self._waiting.setdefault(name, UNWEIGHED)
            self._start()
            self._changed.notify_all()

    def flush(self, timeout_seconds: float = 600.0) -> bool:
        """Archives what is left, whatever its size; False when some of it could not be, or not in time.

        One try: after a refusal of the disk the originals stay where they are.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            if not self._waiting:
                return True
            self._flushing, self._not_before = True, 0.0
            self._start()
            self._changed.notify_all()
            while self._flushing and self._is_running() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 1.0))
            return not self._flushing and not self._waiting

    def close(self, timeout_seconds: float = 600.0) -> bool:
        """`flush`, then the end of the background thread; the archive can be used again."""
        done = self.flush(timeout_seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds if done else 1.0)
        return done

    def set_aside_after(self, known: set[str]) -> list[str]:
        """For resume, before anything is added: puts archives aside that hold a shard which `known` does not name.

        `known` are the shards whose groups had ended at the step from which the run goes on; the others belong to the
        abandoned future. Damaged archives are put aside too. Gives the names of what was moved.
        """
        moved = []
        for path in archive_files(self._run):
            try:
                with Shard(path) as archive:
                    unknown = [source.shard for source in archive.sources() if source.shard not in known]
            except BadShard as error:
                reason = error.reason
            else:
                if not unknown:
                    continue
                reason = f"holds {unknown[0]}, which was not yet consumed where the run goes on"
            if self._run.put_aside(path, reason) is not None:
                moved.append(self._run.relative(path))
        self._held = None
        return moved

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        if not self._is_running():
            self._closing = False
            self._thread = threading.Thread(target=self._work, name="archive", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        """The background thread."""
        while True:
            with self._changed:
                while not self._closing and not self._is_due():
                    pause = self._not_before - time.monotonic()
                    self._changed.wait(pause if pause > 0 and self._waiting else None)
                if self._closing:
                    return
            try:
                self._archive_whole_ones()
            except OSError as error:
                kind = "the disk is full" if files.is_full(error) else str(error)
                logger.warning("spent shards stay where they are, the archive tries again later: %s", kind)
                with self._changed:
                    self._waiting = dict.fromkeys(self._waiting, UNWEIGHED)
                    self._not_before = time.monotonic() + self._retry_seconds
                    self._flushing = False
                    self._changed.notify_all()

    def _archive_whole_ones(self) -> None:
        """Archives; a damaged shard is set aside instead."""
        try:
            self._archive()
        except BadShard as error:
            self._drop_damaged(self._run.relative(error.path), error.reason)

    def _is_due(self) -> bool:
        """Anything new to weigh, enough to write, or asked to; called with the lock held."""
        if not self._waiting or time.monotonic() < self._not_before:
            return False
        weights = self._waiting.values()
        return self._flushing or UNWEIGHED in weights or sum(weights) >= self._target_bytes

    def _archive(self) -> None:
        """Writes as many archives as are full, or all that is left when flushing."""
        while batch := self._next_batch():
            sources = [source for name in batch if (source := self._look(name)) is not None]
            for joined in _of_one_kind(sources):
                self._write(joined)
                self._forget([source.name for source in joined])
        with self._changed:
            if not self._waiting:
                self._flushing = False
            self._changed.notify_all()

    def _remove_if_held(self, name: str) -> bool:
        """Deletes a shard that an archive holds already: a crash or the disk came between."""
        held = self._held_digests()
        path = self._run.path / name
        if name not in held:
            return False
        try:
            with SealedFile(path) as file:
                if file.digest != held[name]:
                    return False
        except (BrokenSeal, FileNotFoundError):
            return False
        files.remove(path)
        del held[name]
        self._forget([name])
        return True

    def _held_digests(self) -> dict[str, str]:
        """Shards that lie there although an archive names them, with the digests of what it holds."""
        if self._held is None:
            files.make_folder(self._run.archive)
            for left in self._run.archive.glob(f"*{files.PART}"):
                files.remove(left)
            held: dict[str, str] = {}
            for path in archive_files(self._run):
                try:
                    with Shard(path) as archive:
                        held.update((source.shard, source.digest) for source in archive.sources())
                except BadShard as error:
                    logger.error("archive %s is set aside: %s", path.name, error.reason)
                    self._run.put_aside(path, error.reason)
            files.fsync_folder(self._run.archive)
            there = {self._run.relative(path) for path in self._run.shards.glob(f"*/*{SUFFIX}")}
            self._held = {name: digest for name, digest in held.items() if name in there}
        return self._held

    def _weigh_new(self) -> None:
        with self._changed:
            names = [name for name, size in self._waiting.items() if size == UNWEIGHED]
        for name in names:
            if not self._remove_if_held(name):
                self._weigh(name)

    def _weigh(self, name: str) -> None:
        try:
            size = (self._run.path / name).stat().st_size
        except FileNotFoundError:
            self._forget([name])
            return
        with self._changed:
            self._waiting[name] = size

    def _next_batch(self) -> list[str]:
        """The shards of the next file; nothing while there are too few of them."""
        self._weigh_new()
        with self._changed:
            batch: list[str] = []
            size = 0
            for name, weight in self._waiting.items():
                if weight == UNWEIGHED or size >= self._target_bytes or len(batch) == MOST_SOURCES:
                    break
                batch.append(name)
                size += weight
            full = size >= self._target_bytes or len(batch) == MOST_SOURCES
            return batch if full or self._flushing else []

    def _look(self, name: str) -> Source | None:
        """What must be known of a shard; None, and no longer waiting, when it is damaged or gone."""
        path = self._run.path / name
        try:
            with Shard(path) as shard:
                shard.verify()
                addresses, attributes = shard.addresses, shard.attributes
                return Source(name, path, shard.digest, addresses, attributes, shard.numbers(), shard.texts())
        except BadShard as error:
            self._drop_damaged(name, error.reason)
        except OSError as error:
            if error.errno not in NOT_THERE_YET:
                raise
            logger.warning("spent shard %s is gone, not archived", name)
            self._forget([name])
        return None

    def _drop_damaged(self, name: str, reason: str) -> None:
        logger.error("spent shard %s is damaged, set aside and not archived: %s", name, reason)
        self._run.put_aside(self._run.path / name, reason)
        self._forget([name])

    def _write(self, sources: Sequence[Source]) -> None:
        """One archive, durably; then the originals are deleted."""
        taken = [int(path.stem) for path in archive_files(self._run)]
        path = self._run.archive / f"{max(taken, default=-1) + 1:06d}{SUFFIX}"
        held, self._held = self._held_digests(), None
        publish_sealed(path, _joined(sources))
        for source in sources:
            files.remove(source.path)
        self._held = held

    def _forget(self, names: Iterable[str]) -> None:
        with self._changed:
            for name in names:
                self._waiting.pop(name, None)


def archive_files(run: RunDirectory) -> list[Path]:
    """The archives of a run, in the order in which they were made."""
    return sorted(path for path in run.archive.glob(f"*{SUFFIX}") if path.stem.isdigit())


def _of_one_kind(sources: Sequence[Source]) -> list[list[Source]]:
    """Sources whose log-probs mean the same, and which have the same columns, lie in one file."""
    kinds: dict[tuple[str, float, tuple[str, ...]], list[Source]] = {}
    for source in sources:
        kind = (source.attributes.run, source.attributes.temperature, tuple(source.addresses))
        kinds.setdefault(kind, []).append(source)
    return list(kinds.values())


def _joined(sources: Sequence[Source]) -> Iterator[Any]:
    """The body of an archive, piece by piece; raises BadShard when a source is damaged."""
    numbers = {name: np.concatenate([source.numbers[name] for source in sources]) for name in schema.SEQUENCE_COLUMNS}
    lengths = np.concatenate([np.diff(source.numbers["offset"]) for source in sources])
    numbers["offset"] = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    texts = {name: [line for source in sources for line in source.texts[name]] for name in schema.TEXT_COLUMNS}
    bounds = np.cumsum([0, *(source.num_rows for source in sources)]).tolist()
    rows = [
        SourceRows(source.name, source.digest, *ends)
        for source, ends in zip(sources, itertools.pairwise(bounds), strict=True)
    ]
    attempt = max(source.attributes.attempt for source in sources)
    attributes = ShardAttributes(sources[0].attributes.run, attempt, WRITER, sources[0].attributes.temperature)

    def column(path: str) -> Iterator[Any]:
        for source in sources:
            yield from _column_of(source, path.removeprefix("tokens/"))

    optional = [name for name in schema.OPTIONAL_COLUMNS if name in sources[0].addresses]
    return shard_layout(attributes, numbers, texts, optional, rows).pieces(column)


def _column_of(source: Source, name: str) -> Iterator[Any]:
    try:
        with SealedFile(source.path) as file:
            for start in range(0, source.num_tokens, PIECE_TOKENS):
                end = min(start + PIECE_TOKENS, source.num_tokens)
                yield read_columns(file, source.addresses, [name], start, end)[name]
    except (BrokenSeal, ValueError) as error:
        raise BadShard(source.path, str(error)) from error
