"""Where the tokens of a micro-batch lie when a model runs on them.

Everything outside of a model's call is in flat token alignment: `tokens` [M] of the micro-batch, sequences laid end to
end. A layout says what the model itself is given, N tokens, and where it computes each flat token. In the plain layout
these are the same; with shared prefixes (`shared_prefix.py`) N is smaller, since several flat tokens lie in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pekoe.pipeline.train.engines.packed_attention import PackedSequences


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """What the model's forward is given, and how to read its output."""

    tokens: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64
    packed: PackedSequences
    """For the keyword `packed_sequences`."""
    slots: Tensor | None = None  # [M] int64
    """The place of each flat token among the model's; None: the same."""

    def at(self, positions: Tensor) -> Tensor:
        """Places [K] in the model's output of flat positions [K]. The same place may come several times: reading it by
        `index_select` or indexing adds up its gradients."""
        return positions if self.slots is None else self.slots[positions]


Layout = Callable[[Mapping[str, Tensor]], TokenLayout]
"""From the tensors of a micro-batch that is not empty (`batch_tensors.py`); a field of each head."""


def plain_layout(tensors: Mapping[str, Tensor]) -> TokenLayout:
    """Sequences as they are."""
    tokens = tensors["tokens"]
    packed = PackedSequences.of(tensors["cu_seqlens"].tolist(), tokens.device)
    return TokenLayout(tokens, tensors["position_ids"], packed)


def one_token_layout(device: torch.device) -> TokenLayout:
    """A single token, for a rank that only takes part in the collectives."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    return TokenLayout(token, torch.zeros_like(token), PackedSequences.of((0, 1), device))
