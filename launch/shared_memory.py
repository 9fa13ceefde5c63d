"""Files in the memory of a node that an MPI library makes, and leaves there when its world is killed.

They count as used memory until the machine starts again. Each rank tells its supervisor which ones it has mapped;
the supervisor of a rank that dies removes them: the world is over then, on every node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MEMORY = "/dev/shm/"
LIBRARIES = ("mpich", "vader_segment", "sm_segment", "osc_rdma", "psm2_shm", "ucx_shm")
"""Beginnings of the names that MPI libraries and their transports use."""


def mapped_files() -> list[str]:
    """Those that this process has mapped and that still have a name."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line[line.index(MEMORY) :].rstrip("\n") for line in maps if MEMORY in line}
    return sorted(path for path in paths if Path(path).name.startswith(LIBRARIES) and not path.endswith(" (deleted)"))


def remove_files(paths: Iterable[str]) -> None:
    """Files of a world that is over."""
    for path in paths:
        if path.startswith(MEMORY):
            with suppress(OSError):
                os.unlink(path)
