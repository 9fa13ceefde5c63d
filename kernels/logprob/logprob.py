"""Log-probs and entropies of sampled tokens, from hidden states and the language-model head, or from logits.

A softmax over the vocabulary is made in float32 (float64 for float64), tile by tile: logits [K, V] are never there at
once, neither forward nor backward, which makes them again. Everything is differentiable once, and torch.compile traces
it. Where probabilities are 0 (logits of -inf), they count nothing.

Legend: K tokens, H features, V rows of the head's weight (vocabulary).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.kernels.logprob.torch_logprob import HiddenLogprobs, LogitsLogprobs

CHUNK_ELEMENTS = 1 << 19
"""Logits that are worked on at a time where they are given: what stays in a processor's cache …"""
CHUNK_ELEMENTS_ELSEWHERE = 1 << 24
"""… and what fills an accelerator (64 MiB)."""


def hidden_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    num_valid: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs [K] of `targets` [K] under softmax((hidden · weightᵀ + bias) / temperature), and the entropies [K] in
    nats.

    `hidden` [K, H], `weight` [V, H] and `bias` [V] may be float32, float64 or less: bfloat16 is multiplied and summed
    in float32. Results are float32 (float64 for float64 hidden states), differentiable in all three; gradients are in
    the dtypes of what they belong to, that of the weight is summed in float32 before. `num_valid` is the size of the
    vocabulary where the weight has rows of padding behind it: they get no probability. Entropies are 0, and have no
    gradient, unless asked for.

    Memory beside arguments and results: forward at most 32 MiB on a CPU, backward at most 64 MiB beside the gradient of
    the hidden states in float32. Raises ValueError naming a target that is outside of the vocabulary.
    """
    num_valid = len(weight) if num_valid is None else num_valid
    check_arguments(hidden, weight, bias, targets, num_valid, temperature)
    checked = torch.ops.pekoe.logprob_targets(targets, num_valid)
    logprobs, entropy = HiddenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, checked, num_valid, float(temperature), with_entropy
    )
    return logprobs, entropy


def logits_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = True,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs [K] of `targets` [K] under softmax(logits / temperature), `logits` [K, V], and the entropies [K] in
    nats, as `hidden_logprobs`. `chunk_rows` are worked on at a time; what is best is known for a device type."""
    _check_temperature(temperature)
    if logits.dim() != 2:
        raise ValueError(f"logits: a shape of {tuple(logits.shape)} is not allowed; [K, V]")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: {chunk_rows} is not allowed; at least 1")
    _check_targets(targets, len(logits))
    checked = torch.ops.pekoe.logprob_targets(targets, logits.shape[1])
    elements = CHUNK_ELEMENTS if logits.device.type == "cpu" else CHUNK_ELEMENTS_ELSEWHERE
    rows = chunk_rows or max(1, elements // max(1, logits.shape[1]))
    logprobs, entropy = LogitsLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, checked, float(temperature), with_entropy, rows
    )
    return logprobs, entropy


def check_arguments(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, num_valid: int, temperature: float
) -> None:
    """ValueError naming what does not fit; the values of targets are not looked at."""
    _check_temperature(temperature)
    if hidden.dim() != 2:
        raise ValueError(f"hidden: a shape of {tuple(hidden.shape)} is not allowed; [K, H]")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight: a shape of {tuple(weight.shape)} is not allowed; [V, {hidden.shape[1]}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: a shape of {tuple(bias.shape)} is not allowed; [{len(weight)}]")
    if not 0 <= num_valid <= len(weight):
        raise ValueError(f"num_valid: {num_valid} is not allowed; 0 up to {len(weight)}, the rows of the weight")
    _check_targets(targets, len(hidden))


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature} is not allowed; must be > 0")


def _check_targets(targets: Tensor, num_rows: int) -> None:
    if targets.shape != (num_rows,) or targets.is_floating_point():
        kind = f"{targets.dtype} of shape {tuple(targets.shape)}"
        raise ValueError(f"targets: {kind} is not allowed; whole numbers [{num_rows}]")
