"""What a local launch knows of its processes: the notes in its private folder, and who inherited the folder's name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from pekoe.launch.supervisor import LAUNCH_DIRECTORY


def read_notes(folder: Path) -> dict[int, dict[str, Any]]:
    """What ranks and supervisors have noted, by rank: `supervisor`, `pid`, and at the end `code`, `orderly`."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json"), reverse=True):
        found.setdefault(int(path.stem.partition("-")[2]), {}).update(json.loads(path.read_text()))
    return found


def processes_of(folder: Path) -> list[psutil.Process]:
    """All processes that were started in a world: each inherited its private folder's name, children too."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(LAUNCH_DIRECTORY) == str(folder):
                found.append(process)
    return found
