"""The sequence room in C, on tensors of the CPU: one pass, in double precision.

Legend: M tokens laid end to end, S sequences.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pekoe.kernels.boundaries import checked_boundaries
from pekoe.kernels.native.native_library import FLAG, POINTER, REAL, SIZE, NativeFunctions, pointer

SUFFIX = {torch.float32: "f32", torch.float64: "f64"}
ARGUMENTS = {
    "gae_token": (POINTER, POINTER, POINTER, POINTER, SIZE, REAL, POINTER, POINTER, POINTER, POINTER),
    "gae_turn": (
        POINTER, POINTER, POINTER, POINTER, FLAG, POINTER, SIZE, REAL, POINTER, POINTER, POINTER, POINTER
    ),
    "discounted_sums": (POINTER, POINTER, POINTER, SIZE, FLAG, POINTER),
    "segments": (POINTER, POINTER, POINTER, SIZE, FLAG, POINTER),
}  # fmt: skip
FUNCTIONS = NativeFunctions(
    {f"{name}_{suffix}": arguments for name, arguments in ARGUMENTS.items() for suffix in SUFFIX.values()}
)


def gae(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    cu_seqlens: Tensor,
    discount: float,
    lambdas: Tensor,
    turns: Tensor | None,
    bootstrap: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [M]."""
    bounds = checked_boundaries(cu_seqlens, len(rewards))
    rewards, mask, lambdas = rewards.contiguous(), mask.contiguous(), lambdas.contiguous()
    values = None if values is None else values.contiguous()
    turns = None if turns is None else turns.contiguous()
    after = None if bootstrap is None else bootstrap.contiguous()
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    rest = (
        pointer(bounds), len(bounds) - 1, discount, pointer(lambdas), _maybe(after), pointer(advantages),
        pointer(returns),
    )  # fmt: skip
    if turns is None:
        FUNCTIONS[f"gae_token_{SUFFIX[rewards.dtype]}"](pointer(rewards), _maybe(values), pointer(mask), *rest)
    else:
        run = FUNCTIONS[f"gae_turn_{SUFFIX[rewards.dtype]}"]
        run(pointer(rewards), _maybe(values), pointer(mask), pointer(turns), turns.element_size(), *rest)
    return advantages, returns


def discounted_sums(values: Tensor, decay: Tensor, cu_seqlens: Tensor, from_left: bool) -> Tensor:
    """[M] from the right, or from the left."""
    bounds = checked_boundaries(cu_seqlens, len(values))
    values, decay = values.contiguous(), decay.contiguous()
    out = torch.empty_like(values)
    run = FUNCTIONS[f"discounted_sums_{SUFFIX[values.dtype]}"]
    run(pointer(values), pointer(decay), pointer(bounds), len(bounds) - 1, from_left, pointer(out))
    return out


def segment_sum(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[S]"""
    return _reduced(values, mask, cu_seqlens, False)


def segment_mean(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[S]"""
    return _reduced(values, mask, cu_seqlens, True)


def _reduced(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor, is_mean: bool) -> Tensor:
    bounds = checked_boundaries(cu_seqlens, len(values))
    values, mask = values.contiguous(), None if mask is None else mask.contiguous()
    out = values.new_empty(len(bounds) - 1)
    run = FUNCTIONS[f"segments_{SUFFIX[values.dtype]}"]
    run(pointer(values), _maybe(mask), pointer(bounds), len(bounds) - 1, is_mean, pointer(out))
    return out


def _maybe(array: Tensor | None) -> ctypes.c_void_p | None:
    return None if array is None else pointer(array)
