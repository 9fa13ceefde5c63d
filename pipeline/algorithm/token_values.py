"""Values of the tokens of packed sequences: the one place where a value head's outputs are shifted against tokens.

The head's output at position t-1 is the value of token t of the same sequence (what is expected before it is sampled);
its output at the last token, of which no token is left to be valued, is the sequence's score: a reward model's
judgement, or what a critic expects after a truncated sequence. Positions come from lengths, never from token ids.

Legend: M tokens laid end to end, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_values(outputs: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(values [M], 0 on the first token of each sequence; scores [S]) of a head's outputs [M] at every position.

    Differentiable. Raises ValueError when a sequence is empty.
    """
    starts, ends = _bounds(cu_seqlens)
    shifted = torch.cat([outputs.new_zeros(min(len(outputs), 1)), outputs[:-1]])
    is_first = torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device).index_fill(0, starts, True)
    return shifted.masked_fill(is_first, 0), outputs[ends - 1]


def head_outputs(values: Tensor, scores: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The outputs [M] at every position again: what the head says of each prefix, its last token included."""
    _, ends = _bounds(cu_seqlens)
    shifted = torch.cat([values[1:], values.new_zeros(min(len(values), 1))])
    return shifted.index_copy(0, ends - 1, scores)


def _bounds(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(first position, position after the last one) of each sequence, int64."""
    starts, ends = cu_seqlens[:-1].to(torch.int64), cu_seqlens[1:].to(torch.int64)
    if (ends <= starts).any():
        raise ValueError("cu_seqlens: a sequence without tokens has no value")
    return starts, ends
