"""Records `0.json`, `1.json`, … in a folder: each number is one writer's, without a lock (on shared filesystems locks
may lie), and no record is ever changed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pekoe.pipeline import files


def numbers(folder: Path) -> list[int]:
    """In ascending order; empty where there is no folder."""
    return sorted(int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit())


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number}.json"


def create(folder: Path, number: int, record: Mapping[str, Any]) -> bool:
    """The record appears whole, for one of all who try: a hard link to a name that exists is refused."""
    path = path_of(folder, number)
    mine = path.with_name(f"{path.name}.{uuid.uuid4().hex}{files.PART}")
    files.write_json(mine, record)
    try:
        os.link(mine, path)
    except FileExistsError:
        return False
    finally:
        files.remove(mine)
    files.fsync_folder(folder)
    return True
