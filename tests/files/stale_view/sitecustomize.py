"""A node whose view of some folders is old: for `STALE_SECONDS` from a path's first look, nothing is there.

Loaded by Python itself where this folder is on PYTHONPATH; acts on the ranks of a world other than the head. Paths
below `STALE_FOLDER` are hidden; `STALE_MARKS` takes a file for each rank that was told that something is not there.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import time
from collections.abc import Callable
from typing import Any

FOLDER = os.environ.get("STALE_FOLDER", "")
SECONDS = float(os.environ.get("STALE_SECONDS", "0"))
RANK = os.environ.get("PMI_RANK") or os.environ.get("PMIX_RANK") or "0"

first_looks: dict[str, float] = {}


def is_late(path: Any) -> bool:
    if not isinstance(path, str | os.PathLike):
        return False
    name = os.fspath(path)
    if not isinstance(name, str) or not name.startswith(FOLDER):
        return False
    late = time.monotonic() - first_looks.setdefault(name, time.monotonic()) < SECONDS
    if late:
        original_open(f"{os.environ['STALE_MARKS']}/rank-{RANK}", "w").close()
    return late


def hiding(call: Callable[..., Any], nothing: Callable[[], Any] | None = None) -> Callable[..., Any]:
    def looked(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        mode = str(arguments[0] if arguments else named.get("mode", "r"))
        if not set(mode) & set("wax") and is_late(path):
            if nothing is not None:
                return nothing()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return call(path, *arguments, **named)

    return looked


original_open = open
if FOLDER and RANK != "0":
    os.stat = hiding(os.stat)
    os.listdir = hiding(os.listdir, list)
    io.open = hiding(io.open)
    builtins.open = hiding(builtins.open)
