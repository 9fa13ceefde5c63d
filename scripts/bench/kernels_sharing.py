"""Samples that share a prompt: the memory of their trie, and what computing the prompt once saves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from in_turns import check, seconds_in_turns
from torch import Tensor

from pekoe.kernels.packing.prefix_trie import prefix_trie
from pekoe.pipeline.train.engines.packed_attention import sdpa_attention
from pekoe.pipeline.train.engines.shared_prefix import shared_layout
from pekoe.pipeline.train.engines.token_layout import TokenLayout, plain_layout

HEADS, GROUPS, SIZE = 9, 3, 64
SAMPLES = 8
LAYER_FLOPS, PAIR_FLOPS = 2 * 192_937_984, 4 * 32 * 128
"""Of a decoder layer of Qwen3-8B, forward: a token in its linear layers, and a pair of query and key."""


def sharing_figures(quick: bool) -> dict[str, Any]:
    figures = trie_figures(3 if quick else 7)
    for prompt, response in ((512, 1000), (4096, 1000)):
        flat, shared = (layout(group_of(prompt, response)) for layout in (plain_layout, shared_layout))
        figures[f"sharing_tokens_prompt_{prompt}"] = len(flat.tokens) / len(shared.tokens)
        figures[f"sharing_flops_prompt_{prompt}"] = layer_flops(flat) / layer_flops(shared)
    return figures | attention_saving(*((256, 128) if quick else (1024, 256)), 3 if quick else 5)


def trie_figures(rounds: int) -> dict[str, Any]:
    """A million tokens: 128 prompts of 8 samples each."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(128):
        prompt = generator.integers(0, 150_000, 512, dtype=np.int32)
        for _ in range(SAMPLES):
            rows.append(np.concatenate([prompt, generator.integers(0, 150_000, 512, dtype=np.int32)]))
    check_mask(rows[: 2 * SAMPLES])
    tokens, bounds = flat_rows(rows)
    trie = prefix_trie(tokens, bounds)
    seconds = seconds_in_turns({"trie": lambda: prefix_trie(tokens, bounds)}, rounds)
    arrays = (trie.tokens, trie.positions, trie.subtree_end, trie.slots)
    return {
        "trie_bytes_per_token": trie.subtree_end.nbytes / len(trie.tokens),
        "trie_all_bytes_per_token": sum(array.nbytes for array in arrays) / len(tokens),
        "trie_ms_per_million": seconds["trie"] * 1e9 / len(tokens),
    }


def check_mask(rows: Sequence[Any]) -> None:
    """Two groups, cut short: a node sees its ancestors and itself, and nothing else."""
    tokens, bounds = flat_rows([np.concatenate([row[:5], row[-4:]]) for row in rows])
    trie = prefix_trie(tokens, bounds)
    nodes = np.arange(len(trie.tokens))
    mask = (nodes[None] <= nodes[:, None]) & (nodes[:, None] < trie.subtree_end[None])
    for start, end in pairwise(bounds):
        path = trie.slots[start:end]
        seen = [np.flatnonzero(mask[node]).tolist() for node in path]
        check(seen == [path[: t + 1].tolist() for t in range(len(path))], "prefix_trie: a wrong mask")
        check(bool((trie.tokens[path] == tokens[start:end]).all()), "prefix_trie: other tokens")


def flat_rows(rows: Sequence[Any]) -> tuple[Any, Any]:
    return np.concatenate(rows), np.concatenate([[0], np.cumsum([len(row) for row in rows])])


def group_of(prompt: int, response: int) -> dict[str, Tensor]:
    """The tensors of a micro-batch: the samples of one prompt."""
    generator = np.random.default_rng(1)
    first = generator.integers(0, 49_152, prompt)
    rows = [np.concatenate([first, generator.integers(0, 49_152, response)]) for _ in range(SAMPLES)]
    tokens, bounds = flat_rows(rows)
    return {
        "tokens": torch.from_numpy(tokens),
        "position_ids": torch.arange(prompt + response).repeat(SAMPLES),
        "cu_seqlens": torch.from_numpy(bounds),
        "groups": torch.zeros(SAMPLES, dtype=torch.int64),
    }


def layer_flops(layout: TokenLayout) -> float:
    """Forward."""
    queries = np.diff(np.array(layout.packed.cu_seqlens)).astype(np.float64)
    keys = np.diff(np.array(layout.packed.key_cu_seqlens)).astype(np.float64)
    pairs = queries * (keys - queries) + queries * (queries + 1) / 2
    return float(len(layout.tokens) * LAYER_FLOPS + pairs.sum() * PAIR_FLOPS)


def attention_saving(prompt: int, response: int, rounds: int) -> dict[str, Any]:
    """Forward and backward of the attention alone."""
    torch.manual_seed(0)
    tensors = group_of(prompt, response)
    flat, shared = plain_layout(tensors), shared_layout(tensors)
    assert shared.slots is not None
    own = [torch.randn(1, heads, len(shared.tokens), SIZE).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    spread = [one.detach()[:, :, shared.slots].requires_grad_() for one in own]
    slope = torch.randn(1, len(flat.tokens), HEADS, SIZE)
    shared_slope = torch.zeros(1, len(shared.tokens), HEADS, SIZE).index_add(1, shared.slots, slope)

    def step(layout: TokenLayout, leaves: Sequence[Tensor], of: Tensor) -> tuple[Tensor, ...]:
        out = sdpa_attention(torch.nn.Module(), *leaves, None, packed_sequences=layout.packed)[0]
        return (out.detach(), *torch.autograd.grad((out * of).sum(), leaves))

    exact, found = step(flat, spread, slope), step(shared, own, shared_slope)
    check(float((found[0][:, shared.slots] - exact[0]).abs().max()) < 1e-4, "shared prompts: another output")
    for gradient, parts in zip(found[1:], exact[1:], strict=True):
        whole = torch.zeros_like(gradient).index_add(2, shared.slots, parts)
        check(float((gradient - whole).abs().max()) < 1e-3, "shared prompts: another gradient")
    seconds = seconds_in_turns(
        {"flat": lambda: step(flat, spread, slope), "shared": lambda: step(shared, own, shared_slope)}, rounds
    )
    return {"sharing_attention_speedup": seconds["flat"] / seconds["shared"]}
