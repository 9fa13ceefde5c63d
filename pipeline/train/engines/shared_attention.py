"""Exact attention of sequences that share a prompt: the prompt is computed once.

A run is a prompt and the responses that follow it, each as if it alone did: `[prompt | response 1 | response 2 | …]`.
The prompt attends causally to itself; a response attends to the whole prompt and causally to itself (causal at the
bottom right of its keys). Keys and values of the prompt get gradients from all of them.

On a CPU no mask is made: all responses attend to the prompt in one call, each to itself in one of its own, and the two
softmaxes are merged by their log-sum-exp. The backward pass of either part then needs only the merged output and
log-sum-exp, since `p = exp(score - lse)`.

Legend: T tokens laid end to end, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

Span = tuple[int, int]


@dataclass(frozen=True)
class Run:
    """Spans of the buffer that lie one behind the other; without responses a sequence like any other."""

    prompt: Span
    responses: tuple[Span, ...] = ()

    @property
    def end(self) -> int:
        return self.responses[-1][1] if self.responses else self.prompt[1]


def attend_merged(runs: Sequence[Run], query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """`query` [1, H, T, D], `key` and `value` [1, G, T, D] of a CPU -> [1, H, T, D]; no dropout, one head size."""
    out: Tensor = _Merged.apply(query, key, value, tuple(runs), scaling)  # type: ignore[no-untyped-call]
    return out


def merges(device_type: str) -> bool:
    """Whether `attend_merged` runs there. Elsewhere a prompt's keys and values are copied for each of its responses,
    and backward keeps the copies."""
    return device_type == "cpu"


def attend_masked(
    runs: Sequence[Run],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """As `attend_merged` on any device, with dropout, a sliding window or values of another size: a mask for each
    response."""
    lengths = [end - start for run in runs for start, end in (run.prompt, *run.responses)]
    queries, keys, values = (whole.split_with_sizes(lengths, dim=2) for whole in (query, key, value))
    pieces, place = [], 0
    for run in runs:
        first = place
        for index in range(1 + len(run.responses)):
            own = (keys[place], values[place])
            if index:
                own = (torch.cat([keys[first], own[0]], dim=2), torch.cat([values[first], own[1]], dim=2))
            plain = index == 0 and window is None
            mask = None if plain else bottom_right_mask(lengths[place], own[0].shape[2], window, query.device)
            pieces.append(attend(queries[place], *own, mask, dropout, scaling))
            place += 1
    return torch.cat(pieces, dim=2)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    """`query` [1, H, T, D] to keys that `mask` [T, keys] shows, or causally where it is None."""
    repeats = query.shape[1] // key.shape[1]
    if mask is not None and repeats > 1 and not takes_mask_and_groups(query.device.type):
        key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def takes_mask_and_groups(device_type: str) -> bool:
    """Whether a fused kernel takes a mask with fewer key-value heads than query heads. Without one all scores of a call
    are held at once."""
    return device_type == "cpu"


def bottom_right_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: the last query sees every key, each one before it one fewer; of these the last `window`."""
    offset = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(offset)
    return mask if window is None else mask.triu(offset + 1 - window)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scaling: float | None
    ) -> Tensor:
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:3], dtype=_wide(query.dtype), device=query.device)
        for run in runs:
            for span in (run.prompt, *run.responses):
                own = slice(*span)
                out[:, :, own], lse[:, :, own] = _flash(
                    query[:, :, own], key[:, :, own], value[:, :, own], True, scaling
                )
            if run.responses:
                asked, seen = slice(run.prompt[1], run.end), slice(*run.prompt)
                found = _flash(query[:, :, asked], key[:, :, seen], value[:, :, seen], False, scaling)
                _merge(out[:, :, asked], lse[:, :, asked], *found)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.runs, ctx.scaling = runs, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]

        def slopes(asked: slice, seen: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, asked],
                query[:, :, asked],
                key[:, :, seen],
                value[:, :, seen],
                out[:, :, asked],
                lse[:, :, asked],
                0.0,
                causal,
                scale=ctx.scaling,
            )
            return found

        for run in ctx.runs:
            for span in (run.prompt, *run.responses):
                own = slice(*span)
                for whole, part in zip(grads, slopes(own, own, True), strict=True):
                    whole[:, :, own] = part
            if run.responses:
                asked, seen = slice(run.prompt[1], run.end), slice(*run.prompt)
                for whole, where, part in zip(grads, (asked, seen, seen), slopes(asked, seen, False), strict=True):
                    whole[:, :, where] += part
        return *grads, None, None


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float | None) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp [1, H, T])."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scaling
    )
    return found


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Two softmaxes over different keys become one over both, in the memory of the first."""
    total = torch.logaddexp(lse, other_lse)
    own_share, other_share = (lse - total).exp_()[..., None], (other_lse - total).exp_()[..., None]
    out.copy_(torch.addcmul(out * own_share, other, other_share))
    lse.copy_(total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
