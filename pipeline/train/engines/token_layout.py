"""Where the tokens of a micro-batch lie when a model runs on them.

Everything outside of a model's call is in flat token alignment: `tokens` [M] of the micro-batch, sequences laid end to
end. A layout says what the model itself is given, N tokens, and where it computes each flat token. In the plain layout
these are the same; with shared prefixes (`shared_prefix.py`) N is smaller, since several flat tokens lie in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        """Places [K] in the model's output of flat positions [K]. The same place may come several times, and its
        gradients add up (in half precision read it by `read`)."""
        return positions if self.slots is None else self.slots[positions]


def read(states: Tensor, places: Tensor) -> Tensor:
    """`states` [N, …] at `places` [K]. Gradients of a place that comes several times are added up in at least float32:
    indexing adds them in their own type, and in half precision errs by 1 % after 64 of them."""
    found: Tensor = _Read.apply(states, places)  # type: ignore[no-untyped-call]
    return found


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_states = len(states)
        return states.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        total = wide.new_zeros(ctx.num_states, *grad.shape[1:])
        if total.device.type == "cpu":
            total.index_add_(0, places, wide)
        else:  # index_add_ adds in any order there
            total.index_put_((places,), wide, accumulate=True)
        return total.to(grad.dtype), None


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
