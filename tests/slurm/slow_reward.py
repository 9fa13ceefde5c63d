"""A reward that takes a moment, so that a tiny run is long enough to be disturbed."""

from __future__ import annotations

import time
from typing import Any

from digit_reward import digit_share


def slow_digit_share(*args: Any, seconds: float, **data: Any) -> float:
    time.sleep(seconds)
    return digit_share(*args, **data)
