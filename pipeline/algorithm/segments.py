"""Sums, means and maxima per sequence of packed, token-aligned tensors.

Legend: M tokens laid end to end, S sequences, `index` [M] says which sequence a token belongs to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.kernels.packing import ragged
from pekoe.kernels.sequence import sequence


def sequence_index(cu_seqlens: Tensor) -> Tensor:
    """[M] int64: the sequence that each token belongs to, from `cu_seqlens` [S+1]."""
    return ragged.sequence_index(cu_seqlens).to(torch.int64)


def segment_sum(values: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """[S] sums of `values` [M] per sequence, or per group: `index` may be in any order."""
    return torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add(0, index, values)


def segment_mean(values: Tensor, mask: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """[S] means over the tokens where `mask` [M] is true, in a fixed order of addition; 0 for a sequence without such
    tokens. `index` does not fall."""
    bounds = torch.searchsorted(index, torch.arange(num_sequences + 1, device=index.device))
    result: Tensor = sequence.segment_mean(values, bounds, mask)
    return result


def segment_max(values: Tensor, mask: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """[S] maxima over the tokens where `mask` [M] is true; -inf for a sequence without such tokens."""
    lowest = torch.full_like(values, -torch.inf)
    start = torch.full((num_sequences,), -torch.inf, dtype=values.dtype, device=values.device)
    return start.scatter_reduce(0, index, torch.where(mask, values, lowest), reduce="amax")
