"""What the fsdp engine does with a value head: transformers' sequence classifier with one label over the same backbone.

transformers' own classifiers give one output a row and guess its position from padding ids; here the forward is
replaced by one that gives the output at every position. Names, configuration and files stay transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.engine import TokenValues, ValueLossFunction
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.engines.token_layout import Layout, TokenLayout, one_token_layout, plain_layout


@dataclass(frozen=True)
class ValueHead:
    """Implements `Head` (`sharded_model.py`) for transformers' sequence classifiers."""

    token_values: TokenValues
    layout: Layout = plain_layout

    fresh = frozenset({"score.weight"})
    """A causal model has none: it starts at 0, the same on any number of ranks, and so do all values."""
    foreign = frozenset({"lm_head.weight"})

    def build(self, settings: Any, **options: Any) -> Any:
        import transformers

        settings.num_labels = 1
        build: Any = transformers.AutoModelForSequenceClassification
        model = build.from_config(settings, **options)
        score = getattr(model, "score", None)
        if not isinstance(score, torch.nn.Linear) or score.out_features != 1 or score.bias is not None:
            raise ValueError(f"{type(model).__name__} has no linear layer `score` with one output: no value head")
        # FSDP's hooks sit around forward, so what backward needs must come out of it.
        kind = type(model)
        model.__class__ = type(kind.__name__, (kind,), {"forward": _outputs_everywhere})
        return model

    def settle(self, model: Any, batch: PackedBatch, device: torch.device, section: str) -> None:
        """There is one way."""

    def export_settings(self, model: Any) -> Mapping[str, Any]:
        name = type(model).__name__.removeprefix("FSDP")
        return {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

    def probe(self, model: Any, batch: PackedBatch, device: torch.device) -> Tensor:
        """Values by another row in place of the head's, which may be 0."""
        size = model.config.get_text_config().hidden_size
        row = torch.cos(torch.arange(size, dtype=torch.float32, device=device) * 1.7)[None]
        return self.values(model, batch_tensors(batch, device), row / size**0.5)[0]

    def share(
        self, model: Any, tensors: dict[str, Tensor], loss: Any, temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values, scores, anchor = self.values(model, tensors)
        share, stats = cast(ValueLossFunction, loss)(values, scores, tensors)
        return share + anchor, stats

    def values(
        self, model: Any, tensors: dict[str, Tensor], row: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(values [M], scores [S], anchor): the anchor is 0, and ties an empty micro-batch to the model, so that its
        rank takes part in the collectives of forward and backward."""
        tokens, device = tensors["tokens"], tensors["tokens"].device
        if not len(tokens):
            output = model(one_token_layout(device), row)
            anchor = output.sum() * 0
            nothing = output[:0]
            return nothing, nothing, anchor
        layout = self.layout(tensors)
        outputs = model(layout, row)
        flat = outputs if layout.slots is None else outputs[layout.slots]
        values, scores = self.token_values(flat, tensors["cu_seqlens"])
        return values, scores, torch.zeros((), device=device)


def _outputs_everywhere(self: Any, layout: TokenLayout, row: Tensor | None = None) -> Tensor:
    """The head's output [N] at every token of the layout, at least float32: half precision ends before the last step.

    `row` [1, hidden size] takes the place of the head's weight.
    """
    states = self.base_model(
        input_ids=layout.tokens[None],
        position_ids=layout.position_ids[None],
        attention_mask=None,
        use_cache=False,
        packed_sequences=layout.packed,
    ).last_hidden_state[0]
    wide = torch.promote_types(states.dtype, torch.float32)
    weight = self.score.weight if row is None else row
    outputs: Tensor = states.to(wide) @ weight.to(wide)[0]
    return outputs
