"""The last layer of a causal model, whose product another function may replace for the time of one call.

FSDP gathers the last layer's weight around the model's forward and nowhere else, and what backward needs must come out
of that forward. So log-probs are made from hidden states and weight in the place of the layer's product, and the model
hands them on as its logits, which they are not: [K, 2] in the place of [K, V].

Legend: K positions that are asked for, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pekoe.kernels.logprob.logprob import hidden_logprobs, logits_logprobs
from pekoe.pipeline.train.engines.token_layout import TokenLayout, read

StandIn = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From hidden states [1, K, H], weight [V, H] and bias [V] to what the model takes for logits, [1, K, …]."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
HALF_TOLERANCE = 0.5
"""Largest difference of log-probs between the two ways, unless rounding explains more: half precision rounds the
logits, which one way never has; the target's and the largest by half of an epsilon each."""
LARGE = 1e4
"""Logits up to this one must pass through a model unchanged."""


class OutputLayer(torch.nn.Linear):
    """A linear layer like any other while nothing stands in."""

    stand_in: StandIn | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.stand_in is None:
            return super().forward(hidden)
        return self.stand_in(hidden, self.weight, self.bias)


def adopt(model: Any) -> None:
    """Makes the model's last layer an `OutputLayer`, if it is a plain linear one."""
    layer = model.get_output_embeddings()
    if type(layer) is torch.nn.Linear:
        layer.__class__ = OutputLayer


def fused_logprobs(
    model: Any, layout: TokenLayout, keep: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [K] of `targets` [K] at the places `keep` [K] of a layout; logits [K, V] never exist."""

    again: Tensor | None = None
    if layout.slots is not None:
        keep, again = torch.unique(keep, return_inverse=True)

    def stand_in(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked = hidden[0] if again is None else read(hidden[0], again)
        found = hidden_logprobs(asked, weight, targets, temperature, bias=bias, with_entropy=with_entropy)
        # Not a view: FSDP hangs its hooks for backward on what comes out.
        return torch.stack([one[None] for one in found], dim=-1)

    with _standing_in(model, stand_in):
        both = run_model(model, layout, keep)
    logprobs, entropy = both.unbind(dim=-1)
    return logprobs, entropy


def run_model(model: Any, layout: TokenLayout, keep: Tensor) -> Tensor:
    """What the model calls its logits, [K, …], at the places `keep` [K]."""
    output = model(
        input_ids=layout.tokens[None],
        position_ids=layout.position_ids[None],
        attention_mask=None,
        use_cache=False,
        logits_to_keep=keep,
        packed_sequences=layout.packed,
    )
    logits: Tensor = output.logits[0]
    return logits


def why_not_fused(model: Any, layout: TokenLayout) -> str | None:
    """Why `fused_logprobs` would not give this model's log-probs; None when it does. Three passes over the tokens of
    `layout`, without gradient; collective over the ranks of a sharded model."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, OutputLayer):
        return f"its last layer is {type(layer).__name__}, not a plain linear one"
    keep = torch.arange(len(layout.tokens), device=layout.tokens.device)
    logits = run_model(model, layout, keep)
    marks = torch.linspace(-LARGE, LARGE, logits.numel(), device=logits.device).to(logits.dtype).view_as(logits)
    with _standing_in(model, lambda hidden, weight, bias: marks[None]):
        passed = run_model(model, layout, keep)
    if not torch.equal(passed, marks):
        return "it changes the logits that its last layer gives (caps, scales or masks them)"
    targets = layout.tokens
    expected, _ = logits_logprobs(logits, targets, 1.0, with_entropy=False)
    found, _ = fused_logprobs(model, layout, keep, targets, 1.0, with_entropy=False)
    rounding = torch.finfo(logits.dtype).eps * float(logits.abs().max())
    allowed = max(TOLERANCE.get(logits.dtype, HALF_TOLERANCE), rounding)
    gap = float((found - expected).abs().max())
    return None if gap <= allowed else f"log-probs differ by {gap:.3g} from those of its logits (allowed {allowed:.3g})"


@contextmanager
def _standing_in(model: Any, stand_in: StandIn) -> Iterator[None]:
    layer: OutputLayer = model.get_output_embeddings()
    layer.stand_in = stand_in
    try:
        yield
    finally:
        layer.stand_in = None
