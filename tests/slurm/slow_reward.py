"""A reward that takes a moment, so that a tiny run is long enough to be disturbed."""

from __future__ import annotations

import time
from typing import Any

from digit_reward import digit_share


def slow_digit_share(*args: Any, **kwargs: Any) -> float:
    time.sleep(0.1)
    return digit_share(*args, **kwargs)
