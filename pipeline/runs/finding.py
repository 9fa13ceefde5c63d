"""What an examination of a run finds: each thing with how bad it is and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; the run goes on, or goes on by itself when it is resumed."""
    PROBLEM = "problem"
    """Something is lost, damaged or failed."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    area: str
    """What it speaks of: attempts, progress, ranks, checkpoints, ledger, shards, exports, set aside, disk, files."""
    severity: Severity
    text: str
    next_step: str = ""
    """What to do, in words, with the exact command; empty where there is nothing to do."""


def ok(area: str, text: str) -> Finding:
    return Finding(area, Severity.OK, text)


def note(area: str, text: str, next_step: str = "") -> Finding:
    return Finding(area, Severity.NOTE, text, next_step)


def problem(area: str, text: str, next_step: str = "") -> Finding:
    return Finding(area, Severity.PROBLEM, text, next_step)


def first_few(names: Iterable[object], most: int = 5) -> str:
    """`a, b, c and 4 more`."""
    shown = [str(name) for name in names]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def counted(count: int, singular: str, plural: str = "") -> str:
    """`1 shard`, `2 shards`."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"
