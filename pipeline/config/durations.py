"""Durations as sbatch's --time takes them."""

from __future__ import annotations

import re

FORMS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
_DAY, _HOUR, _MINUTE = 86400, 3600, 60


def duration_seconds(text: str) -> int | None:
    """The seconds of a duration; None when it is in none of the FORMS or is zero."""
    if not re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", text, re.ASCII):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        units = (_HOUR, _MINUTE, 1)
    else:
        units = {1: (_MINUTE, 0, 0), 2: (_MINUTE, 1, 0), 3: (_HOUR, _MINUTE, 1)}[len(parts)]
    seconds = int(days or 0) * _DAY + sum(part * unit for part, unit in zip(parts, units, strict=False))
    return seconds or None
