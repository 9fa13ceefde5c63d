"""Exact attention over packed sequences: no token sees another sequence.

Transformers' own functions leak across packed sequences unless every one of several conditions holds, so this one is
registered under a name of its own and is told the boundaries in every call (the keyword `packed_sequences` of the
model's forward).

Legend: T tokens laid end to end, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAMES = {"sdpa": "pekoe_packed_split", "flash": "pekoe_packed_varlen"}
"""`actor.fsdp.attention` -> name in transformers' registry, which treats names with `flash` or `sdpa` in them as its
own."""


SHORT = 64
"""Up to this length a padded call beats one per sequence (2-5 times on a CPU core); above it padding costs more."""


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Boundaries of the sequences of one forward pass."""

    cu_seqlens: Tensor  # [S+1] int32, on the model's device
    bounds: tuple[int, ...]
    """The same numbers on the host: no kernel waits for them."""

    @cached_property
    def max_length(self) -> int:
        return max(end - start for start, end in self.spans())

    @cached_property
    def slots(self) -> Tensor:
        """[T] where each token lies when every sequence is padded to `max_length`."""
        rows = [torch.arange(end - start) + row * self.max_length for row, (start, end) in enumerate(self.spans())]
        return torch.cat(rows).to(self.cu_seqlens.device)

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds[:-1], self.bounds[1:], strict=True))

    @classmethod
    def of(cls, cu_seqlens: Sequence[int], device: torch.device) -> PackedSequences:
        bounds = tuple(int(bound) for bound in cu_seqlens)
        return cls(torch.tensor(bounds, dtype=torch.int32, device=device), bounds)


def choose_attention(wanted: str, device_choice: str, dtype: torch.dtype, section: str = "actor") -> str:
    """`sdpa` or `flash`; `auto` is what the device prefers where flash-attn is installed and takes the dtype."""
    half = dtype in (torch.bfloat16, torch.float16)
    installed = importlib.util.find_spec("flash_attn") is not None
    if wanted == "auto":
        return "flash" if device_choice == "flash" and installed and half else "sdpa"
    if wanted == "flash" and not installed:
        raise ValueError(
            f"{section}.fsdp.attention: flash needs the package flash-attn, which is not installed; use sdpa or auto"
        )
    if wanted == "flash" and not half:
        raise ValueError(
            f"{section}.fsdp.attention: flash needs {section}.dtype bfloat16, not {str(dtype).removeprefix('torch.')}"
        )
    if wanted not in NAMES:
        raise ValueError(f"{section}.fsdp.attention: {wanted!r} is not allowed; auto, sdpa or flash")
    return wanted


def register(kind: str) -> str:
    """Makes the packed attention known to transformers; returns the name for `attn_implementation`."""
    functions = {"sdpa": sdpa_attention, "flash": flash_attention}
    AttentionInterface.register(NAMES[kind], functions[kind])
    AttentionMaskInterface.register(NAMES[kind], _no_mask)
    return NAMES[kind]


def _no_mask(*_: Any, **__: Any) -> None:
    """The boundaries come by keyword: there is no mask to build."""
    return None


def sdpa_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_sequences: PackedSequences | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each sequence by itself; `query` [1, H, T, D], `key` and `value` [1, G, T, D] -> [1, T, H,
    D]."""
    packed = _checked(module, query, attention_mask, packed_sequences, options)
    if options.get("softcap") is not None:
        raise ValueError(
            "packed attention: this model caps attention scores, which sdpa cannot; use fsdp.attention flash"
        )
    window = sliding_window if sliding_window is not None and packed.max_length > sliding_window else None
    if packed.max_length <= SHORT and window is None:
        out = _attend_padded(packed, query, key, value, dropout, scaling)
    else:
        out = _attend_split(packed, query, key, value, dropout, scaling, window)
    return out.transpose(1, 2).contiguous(), None


def _attend_split(
    packed: PackedSequences,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[1, H, T, D], a call per sequence."""
    pieces = []
    for start, end in packed.spans():
        part = slice(start, end)
        mask = None if window is None else _window_mask(end - start, window, query.device)
        pieces.append(
            scaled_dot_product_attention(
                query[:, :, part],
                key[:, :, part],
                value[:, :, part],
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(pieces, dim=2)


def _attend_padded(
    packed: PackedSequences,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """[1, H, T, D], one call on [S, H, max_length, D]: padding on the right comes after every token that looks back."""
    num_sequences, length = len(packed.bounds) - 1, packed.max_length

    def pad(flat: Tensor) -> Tensor:
        _, heads, _, size = flat.shape
        room = flat.new_zeros(num_sequences * length, heads, size).index_copy(0, packed.slots, flat[0].transpose(0, 1))
        return room.view(num_sequences, length, heads, size).transpose(1, 2)

    out = scaled_dot_product_attention(
        pad(query), pad(key), pad(value), dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)[packed.slots].transpose(0, 1)[None]


def flash_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_sequences: PackedSequences | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As `sdpa_attention`, by flash-attn's variable-length kernel."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, import-untyped, unused-ignore]

    packed = _checked(module, query, attention_mask, packed_sequences, options)
    out = flash_attn_varlen_func(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_k=packed.cu_seqlens,
        max_seqlen_q=packed.max_length,
        max_seqlen_k=packed.max_length,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=options.get("softcap") or 0.0,
    )
    return out[None], None


def _checked(
    module: torch.nn.Module, query: Tensor, mask: Tensor | None, packed: PackedSequences | None, options: dict[str, Any]
) -> PackedSequences:
    """The boundaries; refuses everything that this attention would silently ignore."""
    if packed is None:
        raise ValueError("packed attention: called without packed_sequences")
    if mask is not None:
        raise ValueError("packed attention: takes no attention_mask")
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise ValueError(f"packed attention: {type(module).__name__} is not causal")
    if options.get("s_aux") is not None:
        raise ValueError("packed attention: attention sinks are not supported")
    if query.shape[0] != 1 or query.shape[2] != packed.bounds[-1]:
        raise ValueError(f"packed attention: {tuple(query.shape)} does not hold {packed.bounds[-1]} packed tokens")
    return packed


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[T, T] bool: the last `window` tokens up to each one."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal.triu(1 - window)
