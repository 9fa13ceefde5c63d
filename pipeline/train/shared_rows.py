"""Which rows of a batch begin alike: the samples of one prompt, computed once over what they share.

Neighbouring rows of one group are cut into runs, so that as few tokens as possible remain to be computed: a run of n
rows that share their first L tokens saves (n - 1) L of them. What is shared is what has equal token ids from the first
token on, whether they were given or sampled: what a causal model computes there depends on nothing else. Each row keeps
at least its last token for itself.

Legend: M tokens laid end to end, S rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pekoe.pipeline.records import common_prefix

Integers = npt.NDArray[np.integer[Any]]

SHORTEST = 4
"""Fewer equal tokens are not worth a run."""


@dataclass(frozen=True)
class SharedRows:
    """Rows `first` to `end` - 1, and how many tokens at their beginning are computed once (0: a row by itself)."""

    first: int
    end: int
    length: int

    @property
    def saved(self) -> int:
        """Tokens that are not computed again."""
        return (self.end - self.first - 1) * self.length


def shared_rows(tokens: Integers, cu_seqlens: Integers, groups: Integers, shortest: int = SHORTEST) -> list[SharedRows]:
    """Runs of the rows with `tokens` [M], `cu_seqlens` [S+1] and group numbers `groups` [S], which hold every row once
    and in order."""
    rows = np.split(tokens, cu_seqlens[1:-1])
    alike = [
        common_prefix(rows[row - 1], rows[row]) if groups[row - 1] == groups[row] else 0
        for row in range(1, len(groups))
    ]
    alike = [length if length >= shortest else 0 for length in alike]
    found: list[SharedRows] = []
    first = 0
    for row in range(len(groups)):
        if row == len(alike) or not alike[row]:
            found += _cut(first, alike[first:row])
            first = row + 1
    return found


def _cut(first: int, alike: Sequence[int]) -> list[SharedRows]:
    """Rows from `first` on, of which neighbours share `alike` tokens each, in runs that save most."""
    best = [0]
    starts = [0]
    for last in range(1, len(alike) + 1):
        length, top, start = alike[last - 1], best[last - 1], last
        for begin in range(last - 1, -1, -1):
            length = min(length, alike[begin])
            before = best[begin - 1] if begin else 0
            if before + (last - begin) * length > top:
                top, start = before + (last - begin) * length, begin
        best.append(top)
        starts.append(start)
    runs: list[SharedRows] = []
    last = len(alike)
    while last >= 0:
        begin = starts[last]
        runs.append(SharedRows(first + begin, first + last + 1, min(alike[begin:last], default=0)))
        last = begin - 1
    return runs[::-1]
