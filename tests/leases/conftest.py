"""A room with a board, on a disk that syncs nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "files")]

from board_room import Room  # noqa: E402
from faulty_disk import UnsyncedDisk, installed  # noqa: E402


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with installed(UnsyncedDisk()):
        yield Room(tmp_path)
