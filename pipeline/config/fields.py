"""How one configuration key is declared: its default, one line of meaning, and what values are allowed."""

from __future__ import annotations

import dataclasses
from typing import Any


def setting(
    default: Any,
    meaning: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field that carries its meaning and its limits as metadata.

    `minimum` and `maximum` are inclusive, `above` is exclusive; None values of the key pass every limit.
    A callable default is a factory (for nested sections, lists and dicts).
    """
    metadata = {
        "meaning": meaning,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
    }
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
