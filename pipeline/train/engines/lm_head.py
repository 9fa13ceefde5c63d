"""What the fsdp engine does with a language-model head: log-probs of tokens.

They come from hidden states and the last layer's weight, without logits [K, V] of the K tokens asked for
(`output_layer.py`). A model that does more to its logits than a linear layer does is computed by them, and the log says
so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pekoe.kernels.logprob.logprob import logits_logprobs
from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.engine import LossFunction, TokenLogprobs
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.engines.output_layer import adopt, fused_logprobs, run_model, why_not_fused
from pekoe.pipeline.train.engines.token_layout import Layout, TokenLayout, one_token_layout, plain_layout, read

logger = logging.getLogger(__name__)

PIECE_ELEMENTS = 1 << 24
"""Logits that are worked on at a time where some are asked for again (64 MiB)."""


@dataclass
class LmHead:
    """Implements `Head` (`sharded_model.py`) for transformers' causal models."""

    token_logprobs: TokenLogprobs
    layout: Layout = plain_layout
    by_logits: bool = True
    """Whether logits are made; until `settle` has looked at the model they are."""

    fresh = frozenset[str]()
    foreign = frozenset[str]()

    def build(self, settings: Any, **options: Any) -> Any:
        import transformers

        build: Any = transformers.AutoModelForCausalLM
        model = build.from_config(settings, **options)
        adopt(model)
        return model

    def settle(self, model: Any, batch: PackedBatch, device: torch.device, section: str) -> None:
        reason = why_not_fused(model, plain_layout(batch_tensors(batch, device)))
        self.by_logits = reason is not None
        if reason is not None:
            name = type(model).__name__.removeprefix("FSDP")
            logger.warning(
                "%s: the log-probs of %s are made from whole logits, which takes memory: %s", section, name, reason
            )

    def export_settings(self, model: Any) -> Mapping[str, Any]:
        return {}

    def probe(self, model: Any, batch: PackedBatch, device: torch.device) -> Tensor:
        return self.logprobs(model, batch_tensors(batch, device), 1.0, with_entropy=False)[0]

    def share(
        self, model: Any, tensors: dict[str, Tensor], loss: Any, temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        objective = cast(LossFunction, loss)
        logprobs, entropy, anchor = self.logprobs(model, tensors, temperature, with_entropy=True)
        share, stats = objective(logprobs, entropy if objective.needs_entropy_gradient else entropy.detach(), tensors)
        return share + anchor, stats

    def logprobs(
        self, model: Any, tensors: dict[str, Tensor], temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs [M], entropies [M], anchor): the anchor is 0, and ties a micro-batch without active tokens to the
        model, so that its rank takes part in the collectives of forward and backward."""
        tokens, device = tensors["tokens"], tensors["tokens"].device
        if not tensors["loss_mask"].any():
            alone = one_token_layout(device)
            found, _ = self._at(model, alone, alone.tokens, alone.tokens, temperature, with_entropy=False)
            anchor = found.sum() * 0
            zeros = torch.zeros(len(tokens), dtype=found.dtype, device=device)
            return zeros + anchor, zeros.clone(), anchor
        layout = self.layout(tensors)

        def logprobs_at(positions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return self._at(model, layout, layout.at(positions), targets, temperature, with_entropy)

        logprobs, entropy = self.token_logprobs(logprobs_at, tokens, tensors["cu_seqlens"], tensors["loss_mask"])
        return logprobs, entropy, torch.zeros((), device=device)

    def _at(
        self, model: Any, layout: TokenLayout, keep: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [K] of `targets` [K] at the places `keep` [K]."""
        if not self.by_logits:
            return fused_logprobs(model, layout, keep, targets, temperature, with_entropy)
        if layout.slots is not None:
            places, again = torch.unique(keep, return_inverse=True)
            if len(places) < len(keep):
                logits = run_model(model, layout, places)
                both: tuple[Tensor, Tensor] = _OfRepeatedRows.apply(  # type: ignore[no-untyped-call]
                    logits, again, targets, temperature, with_entropy
                )
                return both
        return logits_logprobs(run_model(model, layout, keep), targets, temperature, with_entropy=with_entropy)


class _OfRepeatedRows(torch.autograd.Function):
    """(log-probs, entropies) [K] of `targets` [K] by the rows `again` [K] of logits [U, V], which are worked on in
    pieces: repeated rows exist for one piece at a time, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, again: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        order = again.argsort(stable=True)
        counts = torch.bincount(again, minlength=len(logits)).tolist()
        ctx.pieces = _pieces(counts, PIECE_ELEMENTS // logits.shape[1])
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        ctx.save_for_backward(logits, again, targets, order)
        found = []
        for rows, asked in ctx.pieces:
            at = order[asked]
            found.append(_of_piece(logits[rows], again[at] - rows.start, targets[at], temperature, with_entropy))
        sorted_both = [torch.cat(parts) for parts in zip(*found, strict=True)]
        logprobs, entropy = (torch.empty_like(one).index_copy_(0, order, one) for one in sorted_both)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        logits, again, targets, order = ctx.saved_tensors
        whole = torch.empty_like(logits)
        for rows, asked in ctx.pieces:
            at = order[asked]
            piece = logits[rows].detach().requires_grad_()
            with torch.enable_grad():
                found = _of_piece(piece, again[at] - rows.start, targets[at], ctx.temperature, ctx.with_entropy)
            known = [(one, grad[at]) for one, grad in zip(found, grads, strict=True) if grad is not None]
            outputs, slopes = zip(*known, strict=True)
            (whole[rows],) = torch.autograd.grad(outputs, piece, slopes)
        return whole, None, None, None, None


def _of_piece(
    logits: Tensor, again: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """As `_OfRepeatedRows`, at once; every row is asked for, in order."""
    asked = logits if len(again) == len(logits) else read(logits, again)
    return logits_logprobs(asked, targets, temperature, with_entropy=with_entropy)


def _pieces(counts: Sequence[int], most: int) -> list[tuple[slice, slice]]:
    """(rows, where they are asked for when sorted by row): together up to `most` times, or one row."""
    pieces, first, start, end = [], 0, 0, 0
    for row, count in enumerate(counts):
        if row > first and end + count - start > most:
            pieces.append((slice(first, row), slice(start, end)))
            first, start = row, end
        end += count
    return [*pieces, (slice(first, len(counts)), slice(start, end))]
