"""A room with a board, on a disk that syncs nothing."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "files")]

from board_room import Room  # noqa: E402
from faulty_disk import UnsyncedDisk, installed  # noqa: E402


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of small files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.fixture
def room(memory_path: Path) -> Iterator[Room]:
    with installed(UnsyncedDisk()):
        yield Room(memory_path)
