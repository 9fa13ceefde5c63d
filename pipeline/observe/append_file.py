"""A file that only grows, by whole records: what a full disk refuses waits in memory and is written later, in order."""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path
from typing import BinaryIO

from pekoe.pipeline import files

logger = logging.getLogger(__name__)

MAX_WAITING = 1000


class AppendFile:
    """Opened by the first record; `opening` is what a new file begins with. A record is there as a whole or not at all;
    one that a crash tore is ended by `line_end`, so that it spoils no other one.

    Lack of room ends nothing: it is told once, at most `MAX_WAITING` records are kept (then the oldest are lost), and
    every later `append` tries again. Any other OSError is raised. Not thread-safe.
    """

    def __init__(self, path: Path, opening: bytes = b"", line_end: bytes = b"") -> None:
        self._path, self._opening, self._line_end = path, opening, line_end
        self._file: BinaryIO | None = None
        self._waiting: deque[bytes] = deque()
        self._num_lost = 0

    def append(self, record: bytes) -> None:
        """Reaches the operating system before this returns, unless there is no room."""
        self._waiting.append(record)
        was_full = len(self._waiting) > 1 or self._num_lost > 0
        try:
            self._write_waiting()
        except OSError as error:
            if not files.is_full(error):
                raise
            if not was_full:
                logger.error(
                    "NO ROOM for %s (%s): its lines are kept in memory, at most %d, until there is room",
                    self._path, error, MAX_WAITING,
                )  # fmt: skip
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self._num_lost += 1
            return
        if was_full:
            logger.warning("%s is written again; %d lines were lost for lack of room", self._path, self._num_lost)
            self._num_lost = 0

    def close(self) -> None:
        """Tries once more to write what waits; a later `append` opens again."""
        try:
            if self._waiting:
                self._write_waiting()
        except OSError as error:
            logger.error("%d lines of %s are lost: %s", len(self._waiting), self._path, error)
            self._waiting.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_waiting(self) -> None:
        if self._file is None:
            self._file = self._open()
        while self._waiting:
            _append_whole(self._file, self._waiting[0])
            self._waiting.popleft()

    def _open(self) -> BinaryIO:
        files.make_folder(self._path.parent)
        file = files.disk.append(self._path)
        try:
            if file.tell() == 0:
                _append_whole(file, self._opening)
            elif self._line_end and _last_byte(self._path) != self._line_end:
                _append_whole(file, self._line_end)
        except OSError:
            file.close()
            raise
        return file


def _append_whole(file: BinaryIO, record: bytes) -> None:
    """All of it, or the file stays as it was."""
    size = file.seek(0, os.SEEK_END)
    try:
        files.disk.write(file, record)
    except OSError:
        file.truncate(size)
        raise


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
