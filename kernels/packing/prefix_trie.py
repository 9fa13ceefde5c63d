"""Samples that share prefixes, merged token by token, and the blocks of an attention over what is left.

Nodes lie depth first, so that one number a node says which keys a query sees:

    mask(q, k) = k <= q < subtree_end[k]

Legend: M tokens laid end to end, S samples, N nodes (at most M), Q blocks of nodes, P pairs of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pekoe.kernels.boundaries import checked_boundaries, is_tensor
from pekoe.kernels.registry import kernel


@dataclass(frozen=True, eq=False)
class Trie:
    """Arrays, or tensors where the tokens were a tensor."""

    tokens: Any
    """[N] of the nodes, in the dtype of the samples' tokens."""
    positions: Any
    """[N] int32 depth: the position id."""
    subtree_end: Any
    """[N] int32 one past the last node below a node."""
    slots: Any
    """[M] int32 the node of each token: `outputs[slots]` is packed again."""


@dataclass(frozen=True, eq=False)
class BlockMap:
    """Which blocks of keys a block of queries needs, row by row (compressed sparse rows). A pair that is not listed has
    nothing to compute."""

    offsets: Any
    """[Q+1] int64: the entries of a block of queries are `offsets[i]` to `offsets[i + 1]`."""
    keys: Any
    """[P] int32 blocks of keys, ascending."""
    is_full: Any
    """[P] bool: every key of the block is seen by every query; elsewhere the mask decides."""


def prefix_trie(tokens: Any, cu_seqlens: Any) -> Trie:
    """The trie of samples `tokens` [M] (int32 or int64) with boundaries `cu_seqlens` [S+1].

    Children of a node are in the order of the samples that they come from. A sample may be empty, the beginning of
    another one, or another one once more. Time and memory are O(M); tensors are on the CPU.
    """
    if is_tensor(tokens):
        found = prefix_trie(tokens.numpy(), cu_seqlens)
        return Trie(*_tensors(found.tokens, found.positions, found.subtree_end, found.slots))
    array = np.ascontiguousarray(tokens)
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise ValueError(f"tokens: {array.dtype} of shape {array.shape} is not allowed; one row of int32 or int64")
    return Trie(*kernel("packing.prefix_trie")(array, checked_boundaries(cu_seqlens, len(array))))


def block_map(trie: Trie | Any, block: int) -> BlockMap:
    """Pairs of blocks of `block` nodes that an attention over a trie needs. In its place a `subtree_end` [N] of any
    layout goes in: that of packed sequences without sharing is the end of each token's sequence."""
    ends = trie.subtree_end if isinstance(trie, Trie) else trie
    if block < 1:
        raise ValueError(f"block: {block} is not allowed; 1 or more")
    if is_tensor(ends):
        found = block_map(ends.numpy(), block)
        return BlockMap(*_tensors(found.offsets, found.keys, found.is_full))
    array = np.asarray(ends)
    outside = (array <= np.arange(len(array))) | (array > len(array))
    if outside.any():
        node = int(np.flatnonzero(outside)[0])
        raise ValueError(f"subtree_end: {array[node]} of node {node} is not allowed; {node + 1} to {len(array)}")
    whole = np.ascontiguousarray(array, dtype=np.int32)
    return BlockMap(*kernel("packing.block_map")(whole, min(block, max(1, len(whole)))))


def _tensors(*arrays: Any) -> tuple[Any, ...]:
    import torch

    return tuple(torch.from_numpy(array) for array in arrays)
