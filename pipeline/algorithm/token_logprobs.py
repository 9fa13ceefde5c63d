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

CHUNK_ELEMENTS = {"cpu": 1 << 19}
"""Elements of logits that are worked on at a time: what stays in a processor's cache …"""
CHUNK_ELEMENTS_ELSEWHERE = 1 << 24
"""… and what fills an accelerator (64 MiB)."""


def token_logprobs(
    logits_at: Callable[[Tensor], Tensor],
    tokens: Tensor,
    cu_seqlens: Tensor,
    loss_mask: Tensor,
    temperature: float,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] and entropies [M] (nats) of the distributions that the active tokens were drawn from.

    `logits_at(positions [K])` gives the model's logits [K, V] at these positions of the packed buffer. Both results are
    differentiable, float64 for float64 logits and float32 otherwise, 0 where `loss_mask` [M] is 0; entropies are all 0
    unless asked for. Raises ValueError when the mask is set on the first token of a sequence, which nothing predicts.
    """
    active = torch.nonzero(loss_mask).flatten()
    starts = cu_seqlens[:-1].to(active.dtype)
    if torch.isin(active, starts).any():
        raise ValueError("loss_mask: set on the first token of a sequence, which has no log-prob")
    logits = logits_at(active - 1)
    logprobs, entropy = gather_logprobs(logits, tokens[active], temperature, with_entropy=with_entropy)
    blank = torch.zeros(len(tokens), dtype=logprobs.dtype, device=logprobs.device)
    return blank.index_copy(0, active, logprobs), blank.index_copy(0, active, entropy)


def gather_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = True,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs [K] of `targets` [K] under softmax(logits / temperature), `logits` [K, V], and the entropies [K].

    The softmax is made in float32 (float64 for float64 logits), a chunk of rows at a time, in forward and in backward.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature} is not allowed; must be > 0")
    elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    rows = chunk_rows or max(1, elements // max(1, logits.shape[-1]))
    logprobs, entropy = _GatherLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, float(temperature), rows, with_entropy
    )
    return logprobs, entropy


class _GatherLogprobs(torch.autograd.Function):
    """x = logits / T: logp = x[y] - lse(x); H = lse(x) - sum p x; dlogp/dx = onehot - p; dH/dx = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, rows: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(targets), dtype=kind, device=logits.device)
        entropy, normaliser = torch.zeros_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            scaled = logits[part].to(kind, copy=True).div_(temperature)
            lse = torch.logsumexp(scaled, dim=-1)
            logprobs[part] = scaled.gather(1, targets[part, None]).squeeze(1) - lse
            normaliser[part] = lse
            if with_entropy:
                probs = torch.sub(scaled, lse[:, None]).exp_()
                # A probability of 0 counts nothing, also where the logit is -inf.
                entropy[part] = lse - torch.linalg.vecdot(probs, scaled.clamp_(min=torch.finfo(kind).min))
        ctx.save_for_backward(logits, targets, entropy, normaliser)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        logits, targets, entropy, normaliser = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for start in range(0, len(targets), ctx.rows):
            part = slice(start, start + ctx.rows)
            logp = logits[part].to(normaliser.dtype, copy=True).div_(ctx.temperature).sub_(normaliser[part, None])
            piece = _softmax_slope(
                logp,
                None if grad_logprobs is None else grad_logprobs[part, None],
                None if grad_entropy is None else grad_entropy[part, None],
                entropy[part, None],
            )
            if grad_logprobs is not None:
                piece.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad[part] = piece.div_(ctx.temperature)
        return grad, None, None, None, None


def _softmax_slope(logp: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor) -> Tensor:
    """`-p (g + h (log p + H))` [rows, V] for the gradients g and h [rows, 1], in the memory of `logp`."""
    if grad_entropy is None:
        assert grad_logprobs is not None
        return logp.exp_().mul_(-grad_logprobs)
    probs = torch.exp(logp)
    slope = logp.clamp_(min=torch.finfo(logp.dtype).min).add_(entropy).mul_(grad_entropy)
    if grad_logprobs is not None:
        slope.add_(grad_logprobs)
    return slope.mul_(probs).neg_()
