"""From token losses to a micro-batch's share of the loss of the global minibatch.

Denominators are those of the whole minibatch over all data-parallel ranks, known before the first backward, so the
shares simply add up, however the minibatch is cut.

Legend: M tokens of a micro-batch laid end to end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.segments import segment_mean


@dataclass(frozen=True)
class Aggregation:
    """`loss_aggregation` and its denominators."""

    how: str
    num_active: int
    """Active tokens of the global minibatch, before any rejection."""
    num_sequences: int
    """Its sequences that train."""
    max_new_tokens: int

    def __call__(self, values: Tensor, keep: Tensor, mask: Tensor, index: Tensor, num_sequences: int) -> Tensor:
        """The share of `values` [M] where `keep` [M] is true; a token of `mask` [M] that is not kept leaves the
        numerator only.

        token_mean: over all active tokens (DAPO). sequence_mean: mean over sequences of their token means (GRPO).
        constant: over sequences times `max_new_tokens` (Dr. GRPO, Liu et al. 2025).
        """
        kept = torch.where(keep, values, torch.zeros_like(values))
        if self.how == "token_mean":
            return kept.sum() / max(self.num_active, 1)
        sequences = max(self.num_sequences, 1)
        if self.how == "sequence_mean":
            return segment_mean(kept, mask, index, num_sequences).sum() / sequences
        if self.how == "constant":
            return kept.sum() / (sequences * self.max_new_tokens)
        raise ValueError(f"loss_aggregation: {self.how!r} is not allowed; token_mean, sequence_mean or constant")
