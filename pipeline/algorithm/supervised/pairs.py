"""Pairs in a packed batch: sequence 2p is the chosen one of pair p, sequence 2p+1 the rejected one.

Legend: M tokens laid end to end, S = 2P sequences, P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.segments import segment_mean, segment_sum, sequence_index


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """(chosen [P], rejected [P]) of one value a sequence [S]. ValueError when a pair is torn."""
    if len(values) % 2:
        raise ValueError(f"pairs: {len(values)} sequences in a micro-batch; a pair never splits")
    return values[0::2], values[1::2]


def labelled_sums(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] sums of `values` [M] over the labelled tokens of each sequence."""
    index = sequence_index(cu_seqlens)
    kept = torch.where(loss_mask.to(torch.bool), values, torch.zeros_like(values))
    return segment_sum(kept, index, len(cu_seqlens) - 1)


def labelled_means(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] means of `values` [M] over the labelled tokens of each sequence."""
    return segment_mean(values, loss_mask.to(torch.bool), sequence_index(cu_seqlens), len(cu_seqlens) - 1)
