"""A dataset that raises on the head, after the world has formed."""

from __future__ import annotations

import os
from typing import Any

from pekoe.pipeline.records import Example


class HeadOnly:
    """Thirty equal examples, except on the rank that decides."""

    def __init__(self, config: Any) -> None:
        if os.environ.get("PMI_RANK") == "0":
            raise RuntimeError("the head cannot use this data")

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Example:
        return Example(index, f"equal/{index}", ({"role": "user", "content": "1+1="},), {"answer": "2"})
