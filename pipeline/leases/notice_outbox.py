"""A world's end of its inbox at the head: notices go to the disk in order, each whole, each once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pekoe.pipeline import files
from pekoe.pipeline.leases.lease_records import GroupKey, LeaseKey, Notice, inbox_folder, notice_name
from pekoe.pipeline.run_directory import RunDirectory


@dataclass(frozen=True)
class _Untold:
    """A notice that is not on the disk yet, for all that is known."""

    path: Path
    data: bytes
    leases: tuple[LeaseKey, ...]


class NoticeOutbox:
    """Keeps what the disk refuses. Whatever became of a try that failed, the next one writes the same content under the
    same number, which the head takes once."""

    def __init__(self, run: RunDirectory, world: str) -> None:
        self._folder = inbox_folder(run, world)
        self._stream = ""
        self._next_number = 0
        self._untold: deque[_Untold] = deque()

    def __len__(self) -> int:
        return len(self._untold)

    def begin_stream(self, stream: str) -> None:
        """Numbers begin anew; what is untold keeps its old ones."""
        self._stream, self._next_number = stream, 0
        files.make_folder(self._folder)

    def add(self, notice: Notice) -> None:
        """To be written by `write`."""
        path = self._folder / notice_name(self._stream, self._next_number)
        self._next_number += 1
        self._untold.append(_Untold(path, msgspec.msgpack.encode(notice), notice.leases))

    def write(self) -> Iterator[tuple[LeaseKey, ...]]:
        """Writes what is untold, the oldest first; yields the leases that each one ends once it is durable."""
        while self._untold:
            notice = self._untold[0]
            files.make_folder(self._folder)
            files.write_bytes(notice.path, notice.data)
            self._untold.popleft()
            yield notice.leases

    def groups(self) -> set[GroupKey]:
        """Groups whose end is in what is untold."""
        return {(group, try_number) for notice in self._untold for group, try_number, _ in notice.leases}

    def clear(self) -> None:
        """Nobody is to be told any more."""
        self._untold.clear()
