"""M2PO: a bound on the second moment of the log-ratios between proximal and behaviour policy.

Over the active tokens of the whole global minibatch the largest `(log pi_b - log pi_prox)^2` are dropped until the mean
of the rest is below the threshold; when that is impossible the smallest alone is kept. Source: Zheng et al. 2025,
"Prosperity before Collapse" (M2PO).

No rank sees the tokens of the others: the cut is found by a search over the possible values, with a few tiny
reductions. Moments are whole multiples of 2^-40, at most 2^20, and their sums exact, so what is kept depends neither
on the order of the tokens nor on how they lie on ranks; equal moments are kept or dropped together.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from pekoe.pipeline.algorithm.reduction import Reduction
from pekoe.pipeline.records import Int64, PackedBatch

FRACTION_BITS, WHOLE_BITS = 40, 20
LIMB_BITS = 20
"""Sums travel in float64 limbs of so many bits: exact for 2^33 tokens."""
NUM_LIMBS = (FRACTION_BITS + WHOLE_BITS) // LIMB_BITS
ROUND_BITS = 6
"""Each reduction tries 2^6 cuts at once."""


def add_m2_keep(
    batches: Sequence[PackedBatch], threshold: float, over: Reduction, *, mask_truncated: bool = False
) -> None:
    """Puts `m2_keep` [M] uint8 into the extra of each micro-batch of one minibatch, 0 on tokens that do not train.

    Needs `prox_logprobs` [M] there. Collective over `over`.
    """
    masks = [_active(batch, mask_truncated) for batch in batches]
    moments = [_moments(batch)[mask] for batch, mask in zip(batches, masks, strict=True)]
    cut = largest_kept(np.concatenate(moments) if moments else np.zeros(0, np.int64), threshold, over)
    for batch, mask, moment in zip(batches, masks, moments, strict=True):
        keep = np.zeros(batch.num_tokens, dtype=np.uint8)
        keep[mask] = moment <= cut
        batch.extra["m2_keep"] = keep


def largest_kept(moments: Int64, threshold: float, over: Reduction) -> int:
    """The largest moment that is kept, in units of 2^-40, of all ranks' `moments` [n] (int64 in those units)."""
    ordered = np.sort(moments)
    below = [np.concatenate([np.zeros(1, np.int64), np.cumsum(limb)]) for limb in _limbs(ordered)]
    limit = Fraction(threshold) * 2**FRACTION_BITS
    low, width = -1, FRACTION_BITS + WHOLE_BITS + 1
    # The mean of what is kept grows with the cut: `low` always passes (nothing is below 0), `low + 2^width` never must.
    passed = 0
    while width > 0:
        bits = min(ROUND_BITS, width)
        width -= bits
        cuts = [low + (number << width) for number in range(1, 1 << bits)]
        places = np.searchsorted(ordered, np.array(cuts, dtype=np.int64), side="right")
        table = np.stack([places, *(sums[places] for sums in below)]).astype(np.float64)
        counts, *limbs = over.sum(torch.from_numpy(table)).numpy().astype(np.int64).tolist()
        totals = [
            sum(limb << (LIMB_BITS * place) for place, limb in enumerate(parts)) for parts in zip(*limbs, strict=True)
        ]
        for cut, count, total in zip(cuts, counts, totals, strict=True):
            if count and total >= limit * count:
                break
            low, passed = cut, count
    return low if passed else low + 1


def _active(batch: PackedBatch, mask_truncated: bool) -> npt.NDArray[np.bool_]:
    """[M] tokens that train."""
    mask = batch.loss_mask.astype(bool)
    return mask & ~batch.truncated.astype(bool)[batch.sequence_index] if mask_truncated else mask


def _moments(batch: PackedBatch) -> Int64:
    """[M] squared log-ratios in units of 2^-40."""
    if "prox_logprobs" not in batch.extra:
        raise ValueError("m2_threshold: the batch has no prox_logprobs; they come of a forward pass before the update")
    gap = batch.logprobs.astype(np.float64) - batch.extra["prox_logprobs"].astype(np.float64)
    largest = 2.0 ** (WHOLE_BITS / 2)
    squares = np.square(np.nan_to_num(np.abs(gap), nan=largest).clip(max=largest))
    moments: Int64 = np.rint(squares * 2.0**FRACTION_BITS).astype(np.int64)
    return moments


def _limbs(values: Int64) -> list[Int64]:
    """Of each value, lowest first: parts of `LIMB_BITS` bits."""
    low = (1 << LIMB_BITS) - 1
    parts = [(values >> (LIMB_BITS * place)) & low for place in range(NUM_LIMBS - 1)]
    return [*parts, values >> (LIMB_BITS * (NUM_LIMBS - 1))]
