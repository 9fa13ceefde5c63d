"""What the prefix trie and its block map mean: nodes by their prefixes, and the mask written out.

Legend: M tokens laid end to end, S samples, N nodes, Q blocks of nodes, P pairs of blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def prefix_trie(tokens: npt.NDArray[Any], cu_seqlens: Int64) -> tuple[npt.NDArray[Any], Int32, Int32, Int32]:
    """Node tokens, positions, subtree ends [N], slots [M]: a dictionary of (parent, token), then depth first."""
    children: dict[int, dict[int, int]] = {-1: {}}
    place = np.zeros(len(tokens), dtype=np.int64)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        at = -1
        for i in range(begin, end):
            at = children[at].setdefault(int(tokens[i]), i)
            children.setdefault(at, {})
            place[i] = at
    order: list[int] = []
    positions: list[int] = []
    ends: dict[int, int] = {}
    stack = [(first, 0) for first in reversed(children[-1].values())]
    while stack:
        at, depth = stack.pop()
        if depth < 0:
            ends[at] = len(order)
            continue
        order.append(at)
        positions.append(depth)
        stack.append((at, -1))
        stack.extend((child, depth + 1) for child in reversed(children[at].values()))
    number = np.zeros(len(tokens), dtype=np.int32)
    number[order] = np.arange(len(order))
    subtree_end = np.array([ends[at] for at in order], dtype=np.int32)
    nodes = tokens[np.array(order, dtype=np.int64)]
    return nodes, np.array(positions, dtype=np.int32), subtree_end, number[place]


def block_map(subtree_end: Int32, block: int) -> tuple[Int64, Int32, npt.NDArray[np.bool_]]:
    """Offsets [Q+1], key blocks [P], whether they are full [P], from the mask [N, N]."""
    nodes = np.arange(len(subtree_end))
    mask = (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < subtree_end[None, :])
    offsets, keys, full = [0], [], []
    for first in range(0, len(nodes), block):
        for start in range(0, first + 1, block):
            tile = mask[first : first + block, start : start + block]
            if tile.any():
                keys.append(start // block)
                full.append(bool(tile.all()))
        offsets.append(len(keys))
    return np.array(offsets, dtype=np.int64), np.array(keys, dtype=np.int32), np.array(full, dtype=np.bool_)
