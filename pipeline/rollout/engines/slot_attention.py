"""Attention of a transformers model over the rows of a SlotCache, under an attention name of its own.

The name is registered beside the standard ones, so other models of the process keep theirs. The model is called with
`attention_pass=<pass>`; transformers hands it down to every layer's attention, which gives it queries, keys and values.
Nothing is registered for masks: transformers then builds none, and each pass brings its own.

Legend: B rows, T tokens, H query heads, K key heads, G = H/K, D head_dim, L attended length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pekoe.pipeline.rollout.engines.slot_cache import SlotCache

ATTENTION_NAME = "pekoe_slots"
ATTENDED_STEP = 16
"""On accelerators attended lengths are multiples of this: their kernels want aligned masks."""


class AttentionPass(Protocol):
    """One forward pass through all layers."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [B, H, T, D], key and value [B, K, T, D] of the new tokens -> [B, T, H, D]."""
        ...


def slot_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, sliding_window: int | None = None,
    attention_pass: AttentionPass | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The function that transformers calls in every layer."""
    if attention_pass is None:
        raise ValueError("a model served by the hf engine is called through the engine only (no attention_pass given)")
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"rollout.backend: the hf engine cannot serve attention with {name!r}")
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_pass.attend(layer, query, key, value, scale, sliding_window), None


AttentionInterface.register(ATTENTION_NAME, slot_attention)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of new tokens of one sequence inside a packed pass."""

    row: int
    start: int
    """Position of the first token: so many are cached already."""
    count: int
    offset: int
    """Where it begins in the packed buffer."""


class PackedPass:
    """Prefill: segments of many sequences laid end to end, B = 1. Without a cache (log-probs) nothing is stored."""

    def __init__(self, segments: list[Segment], cache: SlotCache | None, device: torch.device) -> None:
        self.segments = segments
        self.cache = cache
        self.device = device
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        stored = None if self.cache is None else self.cache.layer(layer, key)
        parts = []
        for index, segment in enumerate(self.segments):
            new = slice(segment.offset, segment.offset + segment.count)
            end = segment.start + segment.count
            q, k, v = query[:, :, new], key[:, :, new], value[:, :, new]
            if stored is not None:
                row = stored[:, segment.row]
                row[0, :, segment.start : end] = k[0]
                row[1, :, segment.start : end] = v[0]
                k, v = row[0, None, :, :end], row[1, None, :, :end]
            if segment.start == 0 and (window is None or end <= window):
                grouped = q.shape[1] != k.shape[1]
                out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            else:
                groups = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
                out = scaled_dot_product_attention(q, k, v, attn_mask=self._mask(index, window), scale=scale)
            parts.append(out)
        return torch.cat(parts, dim=2).transpose(1, 2)

    def _mask(self, index: int, window: int | None) -> torch.Tensor:
        """[count, start + count], True where the query may look."""
        mask = self._masks.get((index, window))
        if mask is None:
            segment = self.segments[index]
            end = segment.start + segment.count
            queries = torch.arange(segment.start, end, device=self.device)[:, None]
            keys = torch.arange(end, device=self.device)[None]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._masks[index, window] = mask
        return mask


class DecodePass:
    """Decoding: one new token for each of the rows 0..B-1. Lives for many tokens; `advance` goes on by one."""

    def __init__(self, cache: SlotCache, positions: list[int], *, whole_length: bool = False) -> None:
        self.cache = cache
        self.whole_length = whole_length
        """Attend over the cache's whole length always, not only as far as the longest row."""
        self.positions = torch.tensor(positions, device=cache.device)
        self._longest = max(positions) + 1
        self._rows = torch.arange(len(positions), device=cache.device)
        self._columns = torch.arange(cache.length, device=cache.device)[None]
        self._hidden = self._columns > self.positions[:, None]
        self._next_seen = self._rows * cache.length + self.positions
        self._places: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[torch.dtype, int | None], torch.Tensor] = {}

    @property
    def length(self) -> int:
        """L: positions that are attended over."""
        if self.whole_length:
            return self.cache.length
        if self.cache.device.type == "cpu":
            return self._longest
        return min(-(-self._longest // ATTENDED_STEP) * ATTENDED_STEP, self.cache.length)

    @property
    def can_advance(self) -> bool:
        """The cache has room for one more position of every row."""
        return self._longest < self.cache.length

    def advance(self) -> None:
        """Every row goes on by one position."""
        self._longest += 1
        self.positions += 1
        self._next_seen += 1
        self._hidden.view(-1).index_fill_(0, self._next_seen, False)
        for places in self._places.values():
            places += 1
        for key in list(self._masks):
            if key[1] is None:
                self._masks[key].view(-1).index_fill_(0, self._next_seen, 0)
            else:
                del self._masks[key]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        stored = self.cache.layer(layer, key)
        rows, heads, _, dim = key.shape
        places, length = self._place(heads), self.length
        stored[0].view(-1, dim).index_copy_(0, places, key.reshape(-1, dim))
        stored[1].view(-1, dim).index_copy_(0, places, value.reshape(-1, dim))
        out = scaled_dot_product_attention(
            query.reshape(rows, heads, -1, dim),
            stored[0, :rows, :, :length],
            stored[1, :rows, :, :length],
            attn_mask=self._mask(query.dtype, window)[..., :length],
            scale=scale,
        )
        return out.reshape(rows, 1, -1, dim)

    def _place(self, heads: int) -> torch.Tensor:
        """[B * K] where the new token of each row and head lies in a layer's storage, in units of D."""
        places = self._places.get(heads)
        if places is None:
            lines = self._rows[:, None] * heads + torch.arange(heads, device=self.cache.device)[None]
            places = (lines * self.cache.length + self.positions[:, None]).view(-1)
            self._places[heads] = places
        return places

    def _mask(self, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        """[B, 1, 1, cache length], added to the scores: 0 where the row may look, -inf elsewhere."""
        mask = self._masks.get((dtype, window))
        if mask is None:
            hidden = self._hidden
            if window is not None:
                hidden = hidden | (self._columns <= self.positions[:, None] - window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.cache.device).masked_fill_(hidden, float("-inf"))
            self._masks[dtype, window] = mask
        return mask[:, None, None]
