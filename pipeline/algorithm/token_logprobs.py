"""Log-probs of the tokens of packed sequences: the one place where logits are shifted against tokens.

The logits at position t-1 predict token t of the same sequence; everything that leaves this module is in token
alignment. Only active tokens (loss mask 1) are computed: the others, the first of each sequence among them, have
log-prob 0.

Legend: M tokens laid end to end, S sequences, K active tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 24
"""Float32 elements of logits that are held beside the logits themselves (64 MiB)."""


def token_logprobs(
    logits_at: Callable[[Tensor], Tensor], tokens: Tensor, cu_seqlens: Tensor, loss_mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] and entropies [M] (nats) of the distributions that the active tokens were drawn from.

    `logits_at(positions [K])` gives the model's logits [K, V] at these positions of the packed buffer. Both results
    are differentiable, float64 for float64 logits and float32 otherwise, 0 where `loss_mask` [M] is 0. Raises
    ValueError when the mask is set on the first token of a sequence, which nothing predicts.
    """
    active = torch.nonzero(loss_mask).flatten()
    starts = cu_seqlens[:-1].to(active.dtype)
    if torch.isin(active, starts).any():
        raise ValueError("loss_mask: set on the first token of a sequence, which has no log-prob")
    logits = logits_at(active - 1)
    logprobs, entropy = gather_logprobs(logits, tokens[active], temperature)
    blank = torch.zeros(len(tokens), dtype=logprobs.dtype, device=logprobs.device)
    return blank.index_copy(0, active, logprobs), blank.index_copy(0, active, entropy)


def gather_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs [K] of `targets` [K] under softmax(logits / temperature), `logits` [K, V], and the entropies [K].

    The softmax is made in float32 (float64 for float64 logits), a chunk of rows at a time, in forward and in backward.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature} is not allowed; must be > 0")
    rows = chunk_rows or max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    logprobs, entropy = _GatherLogprobs.apply(logits, targets, float(temperature), rows)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _GatherLogprobs(torch.autograd.Function):
    """x = logits / T: logp = x[y] - lse(x); H = lse(x) - sum p x; dlogp/dx = onehot - p; dH/dx = -p (log p + H)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, rows: int) -> tuple[Tensor, Tensor]:
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(targets), dtype=kind, device=logits.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            scaled = logits[part].to(kind) / temperature
            lse = torch.logsumexp(scaled, dim=-1)
            logprobs[part] = scaled.gather(1, targets[part, None]).squeeze(1) - lse
            probs = torch.exp(scaled - lse[:, None])
            entropy[part] = lse - torch.where(probs > 0, probs * scaled, 0).sum(dim=-1)
            normaliser[part] = lse
        ctx.save_for_backward(logits, targets, entropy, normaliser)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        logits, targets, entropy, normaliser = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for start in range(0, len(targets), ctx.rows):
            part = slice(start, start + ctx.rows)
            logp = logits[part].to(normaliser.dtype) / ctx.temperature - normaliser[part, None]
            probs = torch.exp(logp)
            piece = torch.zeros_like(logp)
            if grad_logprobs is not None:
                piece -= probs * grad_logprobs[part, None]
                piece.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            if grad_entropy is not None:
                slope = torch.where(probs > 0, probs * (logp + entropy[part, None]), 0)
                piece -= slope * grad_entropy[part, None]
            grad[part] = (piece / ctx.temperature).to(grad.dtype)
        return grad, None, None, None
