"""The logprob room's operators of torch, and log-probs that are differentiable by them.

torch.ops.pekoe.hidden_statistics ─┐ [K] each          ┌─► hidden_gradients, from the same inputs: logits are made
torch.ops.pekoe.logits_statistics ─┴─► log-probs,      │   again, nothing of K x V is kept
                                       entropies ──────┴─► logits_gradient
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pekoe.kernels.logprob.reference import Four, wide_dtype
from pekoe.kernels.registry import kernel
from pekoe.kernels.torch_operators import add_operator


def _hidden_statistics(hidden: Tensor, *others: Any) -> Four:
    result: Four = kernel("logprob.hidden_statistics", hidden.device.type)(hidden, *others)
    return result


def _hidden_gradients(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    run = kernel("logprob.hidden_gradients", hidden.device.type)
    result: tuple[Tensor, Tensor, Tensor] = run(hidden, *others)
    return result


def _logits_statistics(logits: Tensor, *others: Any) -> Four:
    result: Four = kernel("logprob.logits_statistics", logits.device.type)(logits, *others)
    return result


def _logits_gradient(logits: Tensor, *others: Any) -> Tensor:
    result: Tensor = kernel("logprob.logits_gradient", logits.device.type)(logits, *others)
    return result


def _checked_targets(targets: Tensor, num_valid: int) -> Tensor:
    if len(targets):
        low, high = torch.aminmax(targets)
        if low < 0 or high >= num_valid:
            row = int(((targets < 0) | (targets >= num_valid)).nonzero()[0])
            raise ValueError(f"targets[{row}]: {int(targets[row])} is not allowed; 0 up to {num_valid - 1}")
    return targets.to(torch.int64, copy=True, memory_format=torch.contiguous_format)


def _like_targets(targets: Tensor, num_valid: int) -> Tensor:
    return targets.new_empty(targets.shape, dtype=torch.int64)


def _four_a_row(rows: Tensor, *others: Any) -> Four:
    one, two, three, four = (rows.new_empty(rows.shape[0], dtype=wide_dtype(rows.dtype)) for _ in range(4))
    return one, two, three, four


def _three_gradients(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide, needs = wide_dtype(hidden.dtype), others[-1]
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0, dtype=wide),
        weight.new_empty(weight.shape if needs[1] else 0),
        hidden.new_empty(weight.shape[0] if needs[2] else 0, dtype=wide),
    )


def _like_logits(logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


add_operator("logprob_targets(Tensor targets, int num_valid) -> Tensor", _checked_targets, _like_targets)
add_operator(
    "hidden_statistics(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int num_valid, float temperature, "
    "bool moments) -> (Tensor, Tensor, Tensor, Tensor)",
    _hidden_statistics,
    _four_a_row,
)
add_operator(
    "hidden_gradients(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int num_valid, float temperature, "
    "Tensor maximum, Tensor a, Tensor b, Tensor c, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _hidden_gradients,
    _three_gradients,
)
add_operator(
    "logits_statistics(Tensor logits, Tensor targets, float temperature, bool moments, int chunk_rows) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _logits_statistics,
    _four_a_row,
)
add_operator(
    "logits_gradient(Tensor logits, Tensor targets, float temperature, Tensor maximum, Tensor a, Tensor b, Tensor c, "
    "int chunk_rows) -> Tensor",
    _logits_gradient,
    _like_logits,
)


def outputs(ctx: Any, statistics: Four, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, means of q), all [K]; entropies are 0 and have no gradient unless asked for."""
    maximum, total, moment, picked = statistics
    size, mean = total.log(), moment / total
    logprobs, entropy = (picked - maximum) / temperature - size, size - mean
    if not with_entropy:
        entropy = torch.zeros_like(logprobs)
        ctx.mark_non_differentiable(entropy)
    ctx.set_materialize_grads(False)
    return logprobs, entropy, mean


def slopes(
    grad_logprobs: Tensor | None, grad_entropy: Tensor | None, total: Tensor, mean: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, c) of the gradient with respect to the logits (`reference.py`), all [K]."""
    factor = 1 / (total * temperature)
    g = torch.zeros_like(total) if grad_logprobs is None else grad_logprobs
    h = torch.zeros_like(total) if grad_entropy is None else grad_entropy
    return (h * mean - g) * factor, -h * factor, g / temperature


def hidden_backward(
    ctx: Any,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    finish: Callable[[Tensor], object] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the hidden states, the weight and the bias, by what a forward left in `ctx`. `finish` works on the
    first one in place while it is in the wide dtype."""
    hidden, weight, bias, targets, maximum, total, mean = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    grads = torch.ops.pekoe.hidden_gradients(
        hidden, weight, bias, targets, ctx.num_valid, ctx.temperature, maximum,
        *slopes(grad_logprobs, grad_entropy, total, mean, ctx.temperature), needs,
    )  # fmt: skip
    if needs[0] and finish is not None:
        finish(grads[0])
    return (
        grads[0].to(hidden.dtype) if needs[0] else None,
        grads[1] if needs[1] else None,
        grads[2].to(bias.dtype) if needs[2] else None,
    )


class HiddenLogprobs(torch.autograd.Function):
    """(log-probs, entropies) [K] of hidden states [K, H], a weight [V, H] and a bias [V]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        num_valid: int,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        four = torch.ops.pekoe.hidden_statistics(hidden, weight, bias, targets, num_valid, temperature, with_entropy)
        logprobs, entropy, mean = outputs(ctx, four, temperature, with_entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, *four[:2], mean)
        ctx.num_valid, ctx.temperature = num_valid, temperature
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        return *hidden_backward(ctx, grad_logprobs, grad_entropy), None, None, None, None


class LogitsLogprobs(torch.autograd.Function):
    """(log-probs, entropies) [K] of logits [K, V]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        four = torch.ops.pekoe.logits_statistics(logits, targets, temperature, with_entropy, chunk_rows)
        logprobs, entropy, mean = outputs(ctx, four, temperature, with_entropy)
        ctx.save_for_backward(logits, targets, *four[:2], mean)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        logits, targets, maximum, total, mean = ctx.saved_tensors
        parts = slopes(grad_logprobs, grad_entropy, total, mean, ctx.temperature)
        grad = torch.ops.pekoe.logits_gradient(logits, targets, ctx.temperature, maximum, *parts, ctx.chunk_rows)
        return grad, None, None, None, None
