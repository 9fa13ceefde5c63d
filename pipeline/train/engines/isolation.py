"""The start-up test that packed sequences do not see each other, on the real model, also where they share a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from pekoe.pipeline.records import Finish, Int32, PackedBatch, Trajectory, pack

Forward = Callable[[Sequence[PackedBatch], float], list[torch.Tensor]]

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest difference of log-probs between a sequence alone and packed: kernels may round differently."""

MEAN_TOLERANCE = {torch.bfloat16: 0.2}
"""Largest mean difference where a prompt is shared, in the place of `TOLERANCE`: attention in two parts rounds in
another way in every layer, and single tokens are then far off (a hidden state that is an outlier, another expert). A
model that does not see the prompt is off by 1 in the mean."""

LENGTHS = ((7, 12, 5), (6, 80, 9))
"""Two packs of three sequences: attention may treat short and long ones differently."""
SHARED = 20, (7, 90, 1, 48)
"""Tokens of a prompt, and of the responses to it."""


def check_isolation(forward: Forward, vocab_size: int, dtype: torch.dtype, seed: int) -> None:
    """Raises RuntimeError when a sequence's log-probs depend on what it is packed with.

    Changing one of three sequences must leave the others' log-probs as they are, to the last bit but for 1e-6; and
    each sequence alone must give what it gives packed, within rounding. Collective, like `forward`; takes six
    passes over at most 95 tokens.
    """
    generator = np.random.default_rng(seed)
    for lengths in LENGTHS:
        sequences = [generator.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]
        _check_pack(forward, sequences, (sequences[0] + 1) % vocab_size, TOLERANCE[dtype])


def check_sharing(forward: Forward, vocab_size: int, dtype: torch.dtype, seed: int) -> None:
    """Raises RuntimeError when rows that share a prompt have other log-probs than by themselves, or see each other.

    As `check_isolation`, of an engine that shares prefixes: rows of one group against the same rows as groups of their
    own, in half precision by their mean; and with another response in place of the first, which the others must not
    notice. Three passes over at most 226 tokens.
    """
    generator = np.random.default_rng(seed)

    def draw(length: int) -> Int32:
        return generator.integers(0, vocab_size, length, dtype=np.int32)

    prompt, responses = draw(SHARED[0]), [draw(length) for length in SHARED[1]]
    rows = [np.concatenate([prompt, response]) for response in responses]
    other = np.concatenate([prompt, (responses[0] + 1) % vocab_size])
    apart = pack_tokens(rows)
    together, changed = (replace(pack_tokens(one), groups=apart.groups * 0) for one in (rows, [other, *rows[1:]]))
    wanted, found, without = forward([apart, together, changed], 1.0)
    gaps = (wanted - found).abs()
    by_mean = dtype in MEAN_TOLERANCE
    gap, allowed = float(gaps.mean() if by_mean else gaps.max()), (MEAN_TOLERANCE if by_mean else TOLERANCE)[dtype]
    if not gap <= allowed:
        raise RuntimeError(
            f"log-probs of sequences that share a prompt differ by {gap:.3g}{' in the mean' if by_mean else ''} from "
            f"those of each by itself (allowed {allowed}): this model cannot be trained with actor.enable_tree_training"
        )
    leak = float((found[len(rows[0]) :] - without[len(rows[0]) :]).abs().max())
    if not leak <= 1e-6:
        raise RuntimeError(
            f"sequences that share a prompt see each other: changing one moved another's log-probs by {leak:.3g}; "
            "this model cannot be trained with actor.enable_tree_training"
        )


def _check_pack(forward: Forward, sequences: list[Int32], other: Int32, tolerance: float) -> None:
    """One pack, with `other` in place of its first sequence, and its second sequence alone."""
    batches = [pack_tokens(sequences), pack_tokens([other, *sequences[1:]]), pack_tokens(sequences[1:2])]
    packed, changed, alone = forward(batches, 1.0)
    first, second = len(sequences[0]), len(sequences[0]) + len(sequences[1])
    leak = float((packed[first:] - changed[first:]).abs().max())
    if not leak <= 1e-6:
        raise RuntimeError(
            f"packed sequences see each other: changing one moved another's log-probs by {leak:.3g}; "
            "this model cannot be trained packed with this attention"
        )
    gap = float((packed[first:second] - alone).abs().max())
    if not gap <= tolerance:
        raise RuntimeError(f"a sequence's log-probs differ by {gap:.3g} between packed and alone (allowed {tolerance})")
    if not float((packed[:first] - changed[:first]).abs().max()) > 0:
        raise RuntimeError(
            "the packing test saw no effect of other tokens: the model's output does not depend on its input"
        )


def random_tokens(vocab_size: int, length: int, seed: int) -> PackedBatch:
    """One sequence, the same on all ranks."""
    return pack_tokens([np.random.default_rng(seed).integers(0, vocab_size, length, dtype=np.int32)])


def pack_tokens(sequences: Sequence[Int32]) -> PackedBatch:
    """A batch of bare token sequences in which every token but the first is active."""
    return pack([(index, _trajectory(tokens)) for index, tokens in enumerate(sequences)])


def _trajectory(tokens: Int32) -> Trajectory:
    mask = np.ones(len(tokens), dtype=np.uint8)
    mask[0] = 0
    marks = np.where(mask == 1, 0, -1).astype(np.int32)
    return Trajectory(
        tokens=np.asarray(tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        versions=marks,
        turns=marks.copy(),
        prompt_length=1,
        reward=0.0,
        finish=Finish.STOP,
    )
