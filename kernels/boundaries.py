"""Boundaries of sequences that lie end to end: `cu_seqlens` [S+1] starts at 0, does not fall, and ends at the number of
tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

LARGEST = 2**31 - 1
"""Tokens, positions and indices are int32."""


def on_host(numbers: Any, name: str = "cu_seqlens") -> Int64:
    """[n] int64 of a list, an array or a tensor on the CPU, without a copy where it is that already. ValueError unless
    it is one row of whole numbers."""
    found = np.asarray(numbers)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"{name}: {found.dtype} of shape {found.shape} is not allowed; one row of whole numbers")
    return np.ascontiguousarray(found, dtype=np.int64)


def checked_boundaries(cu_seqlens: Any, num_tokens: int | None = None) -> Int64:
    """`cu_seqlens` [S+1] on the host as int64. ValueError naming what is wrong; `num_tokens` is what it must end at."""
    found = on_host(cu_seqlens)
    if not len(found) or found[0] != 0:
        raise ValueError(f"cu_seqlens: {found[:3].tolist()}… is not allowed; the first entry is 0")
    if (found[1:] < found[:-1]).any():
        row = int(np.flatnonzero(found[1:] < found[:-1])[0])
        raise ValueError(f"cu_seqlens: sequence {row} ends at {found[row + 1]}, before its start at {found[row]}")
    if num_tokens is not None and found[-1] != num_tokens:
        raise ValueError(f"cu_seqlens: the last entry is {found[-1]} where there are {num_tokens} tokens")
    if found[-1] > LARGEST:
        raise ValueError(f"cu_seqlens: {found[-1]} tokens are not allowed; up to {LARGEST}")
    return found


def is_tensor(array: Any) -> bool:
    """Whether this is a torch tensor, told without importing torch."""
    return hasattr(array, "data_ptr")
