"""Exact attention over packed sequences: no token sees another sequence, but for the prompt that it shares with others.

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

from pekoe.kernels.packing.ragged import pack, unpack
from pekoe.pipeline.train.engines.shared_attention import (
    Run,
    attend,
    attend_masked,
    attend_merged,
    bottom_right_mask,
    merges,
)

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
    prompts: tuple[int, ...] = ()
    """Of each sequence the number of the one that it continues, its own where it continues none. The sequences that
    continue one follow it. Empty: none does."""

    @property
    def shares(self) -> bool:
        """Whether some sequence continues another."""
        return bool(self.prompts)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Each sequence with those that continue it."""
        spans = self.spans()
        members: dict[int, list[tuple[int, int]]] = {}
        for number, prompt in enumerate(self.prompts or range(len(spans))):
            members.setdefault(prompt, []).append(spans[number])
        return tuple(Run(first, tuple(rest)) for first, *rest in members.values())

    @cached_property
    def max_length(self) -> int:
        return max(end - start for start, end in self.spans())

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds[:-1], self.bounds[1:], strict=True))

    @cached_property
    def key_cu_seqlens(self) -> Tensor:
        """[S+1] int32 boundaries of the keys of each sequence, with those of its prompt before its own."""
        if not self.shares:
            return self.cu_seqlens
        lengths = [0, *(sum(end - start for start, end in spans) for spans in self.key_spans())]
        bounds = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return bounds.to(self.cu_seqlens.device)

    @cached_property
    def max_keys(self) -> int:
        return max(sum(end - start for start, end in spans) for spans in self.key_spans())

    def key_spans(self) -> list[tuple[tuple[int, int], ...]]:
        """Where the keys of each sequence lie."""
        return [
            spans
            for run in self.runs
            for spans in ((run.prompt,), *((run.prompt, response) for response in run.responses))
        ]

    @classmethod
    def of(cls, cu_seqlens: Sequence[int], device: torch.device, prompts: Sequence[int] = ()) -> PackedSequences:
        """`cu_seqlens` [S+1] from 0 to the number of tokens; `prompts` [S], or empty where no sequence continues
        another."""
        bounds = tuple(int(bound) for bound in cu_seqlens)
        return cls(torch.tensor(bounds, dtype=torch.int32, device=device), bounds, tuple(prompts))


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
    window = sliding_window if sliding_window is not None and packed.max_keys > sliding_window else None
    if packed.shares:
        alike = query.shape[-1] == value.shape[-1]
        if window is None and not dropout and alike and merges(query.device.type):
            out = attend_merged(packed.runs, query, key, value, scaling)
        else:
            out = attend_masked(packed.runs, query, key, value, dropout, scaling, window)
    elif packed.max_length <= SHORT and window is None:
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
    """[1, H, T, D], a call per sequence. Split at once, since the gradient of a slice is as long as the whole."""
    lengths = [end - start for start, end in packed.spans()]
    pieces = []
    parts = zip(*(whole.split_with_sizes(lengths, dim=2) for whole in (query, key, value)), strict=True)
    for length, (own_query, own_key, own_value) in zip(lengths, parts, strict=True):
        mask = None if window is None else bottom_right_mask(length, length, window, query.device)
        pieces.append(attend(own_query, own_key, own_value, mask, dropout, scaling))
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
    length, num_tokens = packed.max_length, packed.bounds[-1]

    def pad(flat: Tensor) -> Tensor:
        return unpack(flat[0].transpose(0, 1), packed.cu_seqlens, length).transpose(1, 2)

    out = scaled_dot_product_attention(
        pad(query), pad(key), pad(value), dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
    )
    return pack(out.transpose(1, 2), packed.cu_seqlens.diff(), num_tokens=num_tokens).transpose(0, 1)[None]


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
    # With more keys than queries the kernel's causal mask is at the bottom right: a response sees its whole prompt.
    out = flash_attn_varlen_func(
        query[0].transpose(0, 1),
        _keys_of_each(packed, key[0].transpose(0, 1)),
        _keys_of_each(packed, value[0].transpose(0, 1)),
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_k=packed.key_cu_seqlens,
        max_seqlen_q=packed.max_length,
        max_seqlen_k=packed.max_keys,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=options.get("softcap") or 0.0,
    )
    return out[None], None


def _keys_of_each(packed: PackedSequences, flat: Tensor) -> Tensor:
    """Keys or values [T, G, D], laid end to end with a prompt's before those of each of its responses."""
    if not packed.shares:
        return flat
    spans = packed.spans()
    parts = dict(zip(spans, flat.split_with_sizes([end - start for start, end in spans]), strict=True))
    return torch.cat([parts[span] for spans_of_one in packed.key_spans() for span in spans_of_one])


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
