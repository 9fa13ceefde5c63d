"""What the fsdp engine does with a language-model head: log-probs of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.engine import LossFunction, TokenLogprobs
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.engines.token_layout import Layout, TokenLayout, one_token_layout, plain_layout


@dataclass(frozen=True)
class LmHead:
    """Implements `Head` (`sharded_model.py`) for transformers' causal models."""

    token_logprobs: TokenLogprobs
    layout: Layout = plain_layout

    fresh = frozenset[str]()
    foreign = frozenset[str]()

    def build(self, settings: Any, **options: Any) -> Any:
        import transformers

        build: Any = transformers.AutoModelForCausalLM
        return build.from_config(settings, **options)

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
        device = tensors["tokens"].device
        if not tensors["loss_mask"].any():
            logits = _logits(model, one_token_layout(device), torch.zeros(1, dtype=torch.int64, device=device))
            anchor = logits.sum() * 0
            zeros = torch.zeros(len(tensors["tokens"]), dtype=_result_dtype(logits), device=device)
            return zeros + anchor, zeros.clone(), anchor
        layout = self.layout(tensors)

        def logits_at(positions: Tensor) -> Tensor:
            return _logits(model, layout, layout.at(positions))

        logprobs, entropy = self.token_logprobs(
            logits_at, tensors["tokens"], tensors["cu_seqlens"], tensors["loss_mask"], temperature, with_entropy
        )
        return logprobs, entropy, torch.zeros((), device=device)


def _logits(model: Any, layout: TokenLayout, keep: Tensor) -> Tensor:
    """Logits [K, V] at the places `keep` [K] of the layout's tokens."""
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


def _result_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
