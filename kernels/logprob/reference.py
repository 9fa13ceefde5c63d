"""Log-probs of sampled tokens, plainly: all logits at once.

Legend: K rows (tokens), H features, V vocabulary, T temperature, x logits, q = (x - maximum) / T for a row's maximum.

From the statistics of a row follow `log p = (picked - maximum) / T - log total` and the entropy
`log total - moment / total`. Statistics of parts of the vocabulary can be merged, so that parts can live on several
ranks. The gradient with respect to the logits of `g log p + h entropy` is, with p = exp(q) / total,

    g (onehot - p) / T - h p (log p + entropy) / T  =  exp(q) (a + b q) + c onehot
    a = -(g - h moment / total) / (T total)    b = -h / (T total)    c = g / T
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Four = tuple[Tensor, Tensor, Tensor, Tensor]
"""(maximum, total, moment, picked) of rows, or (maximum, a, b, c): [K] each."""

WEIGHTLESS = -1e4
"""q whose exp is 0 in every precision: what -inf is taken for where it is a factor beside a weight of 0."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products and sums are made in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """What everything in this room means: log-probs of `targets` [K] under softmax(`logits` [K, V] / temperature), and
    the entropies [K] in nats; differentiable by torch."""
    logp = torch.log_softmax(logits / temperature, -1)
    weighted = torch.where(logp > -torch.inf, logp, torch.zeros_like(logp)) * logp.exp()
    return logp.gather(1, targets[:, None]).squeeze(1), -weighted.sum(1)


def hidden_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    num_valid: int,
    temperature: float,
    moments: bool,
) -> Four:
    """(maximum, total = sum exp(q), moment = sum exp(q) q, picked = the target's logit), all [K], of the logits that
    `hidden` [K, H] makes with the first `num_valid` rows of `weight` [V, H] and `bias` [V].

    In float64 for float64, else in float32. `targets` [K] int64 outside 0..num_valid pick 0. The moment is 0 unless
    `moments`. Without any logit the maximum is the lowest finite number.
    """
    return logits_statistics(_logits(hidden, weight, bias, num_valid), targets, temperature, moments, len(hidden))


def hidden_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    num_valid: int,
    temperature: float,
    maximum: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `hidden` (float64 or float32), `weight` (its dtype) and `bias` (float64 or float32), of the slopes
    exp(q) (a + b q), plus c at the target. What `needs` does not ask for is empty; rows from `num_valid` on get 0."""
    logits = _logits(hidden, weight, bias, num_valid)
    slopes = torch.zeros(len(hidden), len(weight), dtype=logits.dtype, device=logits.device)
    slopes[:, :num_valid] = logits_gradient(logits, targets, temperature, maximum, a, b, c, len(hidden))
    wide = slopes.dtype
    none = slopes.new_empty(0)
    return (
        slopes @ weight.to(wide) if needs[0] else none,
        (slopes.T @ hidden.to(wide)).to(weight.dtype) if needs[1] else none.to(weight.dtype),
        slopes.sum(0) if needs[2] else none,
    )


def logits_statistics(logits: Tensor, targets: Tensor, temperature: float, moments: bool, chunk_rows: int) -> Four:
    """As `hidden_statistics`, of `logits` [K, V]; `chunk_rows` may be worked on at a time."""
    wide = logits.to(wide_dtype(logits.dtype))
    lowest = torch.finfo(wide.dtype).min
    maximum = torch.cat((wide, wide.new_full((len(wide), 1), lowest)), 1).amax(1)
    q = (wide - maximum[:, None]) / temperature
    weights = q.exp()
    moment = (weights * q.clamp(min=WEIGHTLESS)).sum(1) if moments else torch.zeros_like(maximum)
    places, inside = _places(targets, wide.shape[1])
    extended = torch.cat((wide, torch.zeros_like(maximum)[:, None]), 1)
    picked = torch.where(inside, extended.gather(1, places[:, None]).squeeze(1), torch.zeros_like(maximum))
    return maximum, weights.sum(1), moment, picked


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    maximum: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_rows: int,
) -> Tensor:
    """[K, V] in the dtype of `logits`: exp(q) (a + b q), plus c at the target."""
    wide = logits.to(maximum.dtype)
    q = (wide - maximum[:, None]) / temperature
    slopes = q.exp() * (a[:, None] + b[:, None] * q.clamp(min=WEIGHTLESS))
    _, inside = _places(targets, wide.shape[1])
    slopes[inside] += c[inside, None] * torch.nn.functional.one_hot(targets[inside], wide.shape[1])
    return slopes.to(logits.dtype)


def _places(targets: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    inside = (targets >= 0) & (targets < num_columns)
    return torch.where(inside, targets, torch.zeros_like(targets)), inside


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, num_valid: int) -> Tensor:
    wide = wide_dtype(hidden.dtype)
    logits = hidden.to(wide) @ weight[:num_valid].to(wide).T
    return logits if bias is None else logits + bias[:num_valid].to(wide)
