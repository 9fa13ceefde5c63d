"""Log-probs of the tokens of packed sequences: the one place where positions are shifted against tokens.

What a model says at position t-1 predicts token t of the same sequence; everything that leaves this module is in token
alignment. Only active tokens (loss mask 1) are computed: the others, the first of each sequence among them, have
log-prob 0.

Legend: M tokens laid end to end, S sequences, K active tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def token_logprobs(
    logprobs_at: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    tokens: Tensor,
    cu_seqlens: Tensor,
    loss_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] and entropies [M] (nats) of the distributions that the active tokens were drawn from.

    `logprobs_at(positions [K], targets [K])` gives the log-probs [K] of these tokens by the model's distributions at
    these positions of the packed buffer, and the entropies [K]. Both results keep its dtype and gradient, and are 0
    where `loss_mask` [M] is 0. Raises ValueError when the mask is set on the first token of a sequence, which nothing
    predicts.
    """
    active = torch.nonzero(loss_mask).flatten()
    starts = cu_seqlens[:-1].to(active.dtype)
    if torch.isin(active, starts).any():
        raise ValueError("loss_mask: set on the first token of a sequence, which has no log-prob")
    logprobs, entropy = logprobs_at(active - 1, tokens[active])
    blank = torch.zeros(len(tokens), dtype=logprobs.dtype, device=logprobs.device)
    return blank.index_copy(0, active, logprobs), blank.index_copy(0, active, entropy)
