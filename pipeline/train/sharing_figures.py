"""What prefix sharing saves, as two ratios a step: without sharing over with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.shared_rows import shared_rows
from pekoe.pipeline.train.step_statistics import Over


@dataclass(frozen=True)
class TokenWork:
    """Floating-point operations of a forward pass; a backward pass takes twice as many of each, so ratios are equal."""

    per_token: float
    """In the matrices of all layers."""
    per_pair: float
    """In the attention of all layers, for each key that a token sees."""
    per_active: float
    """In the last layer, for each token with loss_mask 1."""


def sharing_figures(batches: Sequence[PackedBatch], work: TokenWork, over: Over) -> dict[str, float]:
    """`train/tree_token_saving` (tokens of the rows / tokens that the policy runs on) and `train/tree_flop_saving` (an
    estimate of the same of its operations) over all trainer ranks; collective."""
    counts = np.zeros(5)  # tokens, saved tokens, pairs, saved pairs, active tokens
    for batch in batches:
        lengths = batch.lengths.astype(np.float64)
        counts[[0, 2, 4]] += lengths.sum(), (lengths * (lengths + 1) / 2).sum(), batch.loss_mask.sum(dtype=np.int64)
        for run in shared_rows(batch.tokens, batch.cu_seqlens, batch.groups):
            counts[[1, 3]] += run.saved, run.saved * (run.length + 1) / 2
    tokens, saved_tokens, pairs, saved_pairs, active = over.sum(torch.from_numpy(counts)).tolist()
    if not tokens:
        return {}
    whole = work.per_token * tokens + work.per_pair * pairs + work.per_active * active
    saved = work.per_token * saved_tokens + work.per_pair * saved_pairs
    return {
        "train/tree_token_saving": tokens / (tokens - saved_tokens),
        "train/tree_flop_saving": whole / (whole - saved),
    }
