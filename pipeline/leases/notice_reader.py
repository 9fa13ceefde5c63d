"""The head's end of the inboxes: every notice once, in the order in which its world wrote them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pekoe.pipeline import files
from pekoe.pipeline.leases import lease_files
from pekoe.pipeline.leases.lease_records import Notice, inbox_folder, is_world_name, notice_name, parse_notice_name
from pekoe.pipeline.run_directory import RunDirectory

logger = logging.getLogger(__name__)

MAX_NOTICES = 64
"""Of one world in one pass."""


@dataclass
class _Stream:
    """What a world wrote since it joined."""

    next_number: int = 0
    gap_since: float | None = None
    """Since when a later notice is seen, but not the next one."""


@dataclass
class _Inbox:
    """One world's folder."""

    streams: dict[str, _Stream] = field(default_factory=dict)
    empty_since: float | None = None


class NoticeReader:
    """Remembers how far it has read, so that a file that cannot be removed is not delivered twice."""

    def __init__(self, run: RunDirectory, attempt: int, patience_seconds: float) -> None:
        self.run = run
        self.attempt = attempt
        self.patience_seconds = patience_seconds
        """How long a notice that must be there is waited for; an empty inbox of a dead world is kept four times as
        long."""
        self.num_foreign = 0
        """Notices of other attempts: thrown away."""
        self.num_lost = 0
        self._inboxes: dict[str, _Inbox] = {}

    def read(self, world: str, now: float) -> Iterator[Notice]:
        """The next notices of a world; one listing. What was yielded is not read again, whatever happens after it."""
        inbox = self._inboxes.setdefault(world, _Inbox())
        there: dict[str, set[int]] = {}
        for name in lease_files.names_in(inbox_folder(self.run, world)):
            if parsed := parse_notice_name(name):
                there.setdefault(parsed[0], set()).add(parsed[1])
        if there:
            inbox.empty_since = None
        elif inbox.empty_since is None:
            inbox.empty_since = now
        for name in sorted(there):
            stream = inbox.streams.setdefault(name, _Stream())
            self._remove_read(world, name, [number for number in there[name] if number < stream.next_number])
            yield from self._read_stream(world, name, stream, max(there[name]), now)

    def read_of_others(self, live: set[str], now: float) -> Iterator[Notice]:
        """Notices of worlds that are taken for dead; their inboxes go when nothing more comes."""
        for world in sorted(lease_files.names_in(self.run.inbox)):
            if world.endswith(files.DISCARDED):
                files.put_away(self.run.inbox / world)
            if not is_world_name(world) or world in live:
                continue
            yield from self.read(world, now)
            empty_since = self._inboxes[world].empty_since
            if empty_since is not None and now - empty_since > 4 * self.patience_seconds:
                self._close(world)

    def _close(self, world: str) -> None:
        """What is written in the instant of the move is lost: its groups are offered again."""
        files.put_away(inbox_folder(self.run, world))
        del self._inboxes[world]

    def _read_stream(self, world: str, name: str, stream: _Stream, last: int, now: float) -> Iterator[Notice]:
        for number in range(stream.next_number, min(last + 1, stream.next_number + MAX_NOTICES)):
            path = inbox_folder(self.run, world) / notice_name(name, number)
            notice = _read(path)
            if notice is None:
                if stream.gap_since is None:
                    stream.gap_since = now
                if now - stream.gap_since <= self.patience_seconds:
                    return
                self.num_lost += 1
                logger.warning("notice %s cannot be read: its groups are offered again", self.run.relative(path))
            stream.gap_since = None
            stream.next_number = number + 1
            if notice is not None and notice.attempt == self.attempt:
                yield notice
            elif notice is not None:
                self.num_foreign += 1
            self._remove_read(world, name, [number])

    def _remove_read(self, world: str, stream: str, numbers: list[int]) -> None:
        for number in numbers:
            path = inbox_folder(self.run, world) / notice_name(stream, number)
            try:
                files.remove(path)
            except OSError as error:
                logger.debug("%s stays for now: %s", self.run.relative(path), error)


def _read(path: Path) -> Notice | None:
    """None when there is no such file, or no notice in it; whatever else the disk says is raised: it is there."""
    try:
        return msgspec.msgpack.decode(files.disk.read(path), type=Notice)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
