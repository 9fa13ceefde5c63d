"""0 for everything: for runs that a reward model or a teacher alone judges."""

from __future__ import annotations

from typing import Any


def zero_reward(*_: Any, **__: Any) -> float:
    """Whatever the completion says."""
    return 0.0
