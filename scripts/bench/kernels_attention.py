"""Attention over packed sequences on the CPU, against the fastest exact way that is known there: a call of
scaled_dot_product_attention per sequence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from in_turns import check, seconds_in_turns
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from pekoe.pipeline.train.engines.packed_attention import PackedSequences, sdpa_attention

LENGTHS = (1201, 77, 640, 333, 901, 128, 512, 304)
"""4,096 tokens in eight sequences; quick: the first 2,251 in four."""
HEADS, GROUPS, SIZE = 9, 3, 64


def attention_figures(quick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    lengths = LENGTHS[:4] if quick else LENGTHS
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    leaves = [torch.randn(1, heads, bounds[-1], SIZE).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    packed = PackedSequences.of(bounds, torch.device("cpu"))
    slope = torch.randn(1, bounds[-1], HEADS, SIZE)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sdpa_attention(torch.nn.Module(), query, key, value, None, packed_sequences=packed)[0]

    def fastest(*qkv: Tensor) -> Tensor:
        parts = [[one[:, :, start:end] for one in qkv] for start, end in pairwise(bounds)]
        outs = [scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return torch.cat(outs, dim=2).transpose(1, 2)

    def padded(*qkv: Tensor) -> Tensor:
        rows = [
            pad_sequence([one[0, :, start:end].transpose(0, 1) for start, end in pairwise(bounds)], batch_first=True)
            for one in qkv
        ]
        query, key, value = (one.transpose(1, 2) for one in rows)
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
        return torch.cat([out[row, :length] for row, length in enumerate(lengths)])[None]

    def step(function: Any) -> tuple[Tensor, ...]:
        out = function(*leaves)
        return (out.detach(), *torch.autograd.grad((out * slope).sum(), leaves))

    exact = step(padded)
    for function in (ours, fastest):
        off = max(float((a - b).abs().max()) for a, b in zip(step(function), exact, strict=True))
        check(off < 1e-3, f"packed attention is off by {off} in its output or gradients")
    ways = {"ours": lambda: step(ours), "fastest": lambda: step(fastest)}
    if not quick:
        ways["padded"] = lambda: step(padded)
    seconds = seconds_in_turns(ways, 3 if quick else 7)
    figures = {"attention_over_fastest": seconds["ours"] / seconds["fastest"], "attention_ms": seconds["ours"] * 1e3}
    if not quick:
        figures["attention_over_padded"] = seconds["padded"] / seconds["ours"]
    return figures
