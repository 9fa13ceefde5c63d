"""Work on packed tokens: GAE against a plain stream, a Python loop and verl's padded loop; pack and unpack against
masks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from in_turns import check, seconds_in_turns
from independent import find_independent
from kernels_packing import lengths_of
from torch import Tensor

from pekoe.kernels.packing.ragged import pack, unpack
from pekoe.kernels.sequence.sequence import gae

DISCOUNT, LAMBDA = 0.999, 0.95


def token_figures(quick: bool) -> dict[str, Any]:
    rounds = 3 if quick else 7
    return gae_figures(quick, rounds) | ragged_figures(rounds)


def gae_figures(quick: bool, rounds: int) -> dict[str, Any]:
    """A million tokens in float32: 128 sequences with a long tail of up to 32,768.

    The stream is a copy into new memory, since the results are new, too: as many bytes as go in and out of GAE."""
    lengths = lengths_of(128, 8000, 32_768)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    count, generator = int(bounds[-1]), torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(count, generator=generator) for _ in range(2))
    mask = torch.ones(count, dtype=torch.uint8)
    for start, length in zip(bounds[:-1], lengths, strict=True):
        # A prompt, and what a tool said.
        mask[start : start + length // 8] = 0
        mask[start + length // 2 : start + length // 2 + length // 16] = 0
    cu_seqlens = torch.from_numpy(bounds)

    def ours() -> tuple[Tensor, Tensor]:
        return gae(rewards, values, mask, cu_seqlens, discount=DISCOUNT, lam=LAMBDA)

    lists = (rewards.tolist(), values.tolist(), mask.tolist())
    exact = python_gae(*lists, bounds.tolist())
    active = mask.bool()
    error = float((ours()[0].double() - torch.tensor(exact, dtype=torch.float64))[active].abs().max())
    check(error < 1e-4, f"gae is off by {error}")
    find_independent()
    verl_gae = importlib.import_module("verl.trainer.ppo.core_algos").compute_gae_advantage_return
    padded = padded_rows(lengths, rewards, values, mask)
    theirs = verl_gae(*padded, DISCOUNT, LAMBDA)[1][padded[2] > 0]
    check(float((theirs - ours()[1][active]).abs().max()) < 1e-3, "gae: other returns than verl's padded loop")
    arrays = (rewards.double().numpy(), values.double().numpy(), mask.numpy())
    slow = seconds_in_turns(
        {
            "arrays": lambda: python_gae(*arrays, bounds.tolist()),
            "lists": lambda: python_gae(*lists, bounds.tolist()),
            "padded": lambda: verl_gae(*padded, DISCOUNT, LAMBDA),
        },
        1 if quick else 3,
    )
    # Two float32 and a byte are read for every token, two float32 are written: 17 bytes.
    source = torch.randint(0, 100, (17 * count // 2,), dtype=torch.uint8)
    target = torch.empty_like(source)
    ways: dict[str, Callable[[], Any]] = {
        "ours": ours, "stream": lambda: source.clone(), "warm": lambda: target.copy_(source)
    }  # fmt: skip
    if not quick:
        # Eight million tokens do not fit into a processor's caches.
        many = (rewards.repeat(8), values.repeat(8), mask.repeat(8))
        many_bounds = torch.cat([torch.zeros(1, dtype=torch.int64), torch.from_numpy(lengths).repeat(8).cumsum(0)])
        large = source.repeat(8)
        ways |= {
            "many": lambda: gae(*many, many_bounds, discount=DISCOUNT, lam=LAMBDA), "many_stream": lambda: large.clone()
        }  # fmt: skip
    seconds = seconds_in_turns(ways, 4 * rounds)
    figures = {"gae_over_stream_8m": seconds["many"] / seconds["many_stream"]} if not quick else {}
    return figures | {
        "gae_over_stream": seconds["ours"] / seconds["stream"],
        "gae_over_warm_stream": seconds["ours"] / seconds["warm"],
        "gae_over_padded": slow["padded"] / seconds["ours"],
        "gae_over_python": slow["arrays"] / seconds["ours"],
        "gae_over_python_lists": slow["lists"] / seconds["ours"],
        "gae_ms_per_million": seconds["ours"] * 1e9 / count,
        "gae_error": error,
    }


def python_gae(rewards: Any, values: Any, mask: Any, bounds: list[int]) -> list[float]:
    """The definition, token by token, in double precision: of numpy arrays, as it is usually written, or of lists."""
    advantages = [0.0] * len(rewards)
    for start, end in pairwise(bounds):
        following, later = 0.0, 0.0
        for t in range(end - 1, start - 1, -1):
            if mask[t]:
                later = rewards[t] + DISCOUNT * following - values[t] + DISCOUNT * LAMBDA * later
                advantages[t], following = later, values[t]
    return advantages


def padded_rows(lengths: Any, *flat: Tensor) -> list[Tensor]:
    """[S, T] of each."""
    rows = [torch.nn.utils.rnn.pad_sequence(list(one.split(lengths.tolist())), batch_first=True) for one in flat]
    return [*rows[:-1], rows[-1].float()]


def ragged_figures(rounds: int) -> dict[str, Any]:
    """A field of float32, a million tokens in rows as long as the longest of a thousand."""
    lengths = lengths_of(1000, 1000, 8192)
    width = int(lengths.max())
    padded = torch.randn(len(lengths), width)
    mask = torch.arange(width)[None] < torch.from_numpy(lengths)[:, None]
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    packed, on_host = padded[mask], torch.from_numpy(lengths)
    check(torch.equal(pack(padded, on_host), packed), "pack: other tokens than a boolean mask gives")

    def put() -> Tensor:
        rows = torch.zeros(len(lengths), width)
        rows[mask] = packed
        return rows

    def ours() -> Tensor:
        return unpack(packed, cu_seqlens, width)

    check(torch.equal(ours(), put()), "unpack: other rows than a boolean mask gives")
    ways: dict[str, Callable[[], Any]] = {
        "pack": lambda: pack(padded, on_host), "mask": lambda: padded[mask], "unpack": ours, "put": put,
        "pack_arrays": lambda: pack(padded.numpy(), lengths), "mask_arrays": lambda: padded.numpy()[mask.numpy()],
    }  # fmt: skip
    seconds = seconds_in_turns(ways, 3 * rounds)
    return {
        "pack_over_mask": seconds["mask"] / seconds["pack"],
        "unpack_over_mask": seconds["put"] / seconds["unpack"],
        "pack_over_numpy_mask": seconds["mask_arrays"] / seconds["pack_arrays"],
        "pack_ms_per_million": seconds["pack"] * 1e9 / len(packed),
        "unpack_ms_per_million": seconds["unpack"] * 1e9 / len(packed),
    }
