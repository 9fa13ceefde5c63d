"""Pairs in a packed batch: sequence 2p is the chosen one of pair p, sequence 2p+1 the rejected one.

Legend: M tokens laid end to end, S = 2P sequences, P pairs.
"""

from __future__ import annotations

from torch import Tensor

from pekoe.kernels.sequence.sequence import segment_mean, segment_sum


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """(chosen [P], rejected [P]) of one value a sequence [S]. ValueError when a pair is torn."""
    if len(values) % 2:
        raise ValueError(f"pairs: {len(values)} sequences in a micro-batch; a pair never splits")
    return values[0::2], values[1::2]


def labelled_sums(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] sums of `values` [M] over the labelled tokens of each sequence."""
    result: Tensor = segment_sum(values, cu_seqlens, loss_mask)
    return result


def labelled_means(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] means of `values` [M] over the labelled tokens of each sequence."""
    result: Tensor = segment_mean(values, cu_seqlens, loss_mask)
    return result
