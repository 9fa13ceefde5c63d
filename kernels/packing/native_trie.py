"""The prefix trie and its block map in C.

Legend: M tokens laid end to end, N nodes, Q blocks of nodes, P pairs of blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pekoe.kernels.native.native_library import POINTER, SIZE, NativeFunctions, pointer

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

FUNCTIONS = NativeFunctions(
    {
        "prefix_trie": (POINTER, SIZE, POINTER, SIZE, POINTER, POINTER, POINTER, POINTER),
        "block_map": (POINTER, SIZE, SIZE, POINTER, POINTER, POINTER),
    },
    SIZE,
)


def prefix_trie(tokens: npt.NDArray[Any], cu_seqlens: Int64) -> tuple[npt.NDArray[Any], Int32, Int32, Int32]:
    """Node tokens, positions, subtree ends [N], slots [M]."""
    nodes = np.empty_like(tokens)
    positions, ends, slots = (np.empty(len(tokens), dtype=np.int32) for _ in range(3))
    count = FUNCTIONS["prefix_trie"](
        pointer(tokens), tokens.itemsize, pointer(cu_seqlens), len(cu_seqlens) - 1, pointer(nodes), pointer(positions),
        pointer(ends), pointer(slots),
    )  # fmt: skip
    if count < 0:
        raise MemoryError(f"prefix trie of {len(tokens)} tokens")
    return nodes[:count].copy(), positions[:count].copy(), ends[:count].copy(), slots


def block_map(subtree_end: Int32, block: int) -> tuple[Int64, Int32, npt.NDArray[np.bool_]]:
    """Offsets [Q+1], key blocks [P], whether they are full [P]: counted first, then written."""
    offsets = np.empty(-(-len(subtree_end) // block) + 1, dtype=np.int64)
    keys, full = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)
    for is_count in (True, False):
        where = (None, None) if is_count else (pointer(keys), pointer(full))
        if FUNCTIONS["block_map"](pointer(subtree_end), len(subtree_end), block, pointer(offsets), *where):
            raise MemoryError(f"block map of {len(subtree_end)} nodes")
        if is_count:
            keys, full = np.empty(offsets[-1], dtype=np.int32), np.empty(offsets[-1], dtype=np.bool_)
    return offsets, keys, full
