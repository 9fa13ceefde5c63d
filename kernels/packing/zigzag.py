"""Packed sequences over the ranks of context parallelism, so that causal attention costs each of them the same.

Every sequence is cut into 2R chunks for R ranks, and rank r gets chunks r and 2R - 1 - r: an early and a late one. All
chunks of a sequence have one size: a length that 2R does not divide is padded at its end to the next multiple, as
Megatron and TransformerEngine do, and ranks hold the same number of tokens. Who cares for the padding masks where
`indices` is -1; it comes after every real token of its sequence, so that causal attention never looks at it.

Legend: M tokens laid end to end, S sequences, R ranks, C tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pekoe.kernels.boundaries import LARGEST, checked_boundaries
from pekoe.kernels.registry import kernel

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ZigzagSplit:
    """Which tokens are whose."""

    indices: Int32
    """[R, C] place of each rank's tokens in the packed batch; -1 is padding."""
    positions: Int32
    """[R, C] their position ids; padding goes on counting."""
    inverse: Int32
    """[M] place of each packed token in the ranks' tokens laid end to end: `gathered.reshape(R * C, ...)[inverse]`."""
    cu_seqlens: Int32
    """[S+1] boundaries of a rank's part of each sequence, the same on all ranks. Its first half is the early chunk."""
    padded: Int32
    """[S+1] boundaries of the padded sequences, R times `cu_seqlens`."""


def zigzag_split(cu_seqlens: Any, num_ranks: int) -> ZigzagSplit:
    """The split of sequences with boundaries `cu_seqlens` [S+1] (on the host) over `num_ranks`."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks: {num_ranks} is not allowed; 1 or more")
    bounds = checked_boundaries(cu_seqlens)
    step = 2 * num_ranks
    padded = np.concatenate([np.zeros(1, np.int64), np.cumsum(-(-np.diff(bounds) // step) * step)])
    if padded[-1] > LARGEST:
        raise ValueError(f"cu_seqlens: {padded[-1]} tokens with padding are not allowed; up to {LARGEST}")
    indices, positions, inverse = kernel("packing.zigzag_split")(bounds, padded, num_ranks)
    return ZigzagSplit(indices, positions, inverse, (padded // num_ranks).astype(np.int32), padded.astype(np.int32))
