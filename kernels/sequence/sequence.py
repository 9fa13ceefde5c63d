"""Scans and sums inside packed sequences.

Values are float32 or float64, on any device; numpy arrays come back as numpy arrays. Sums are carried in double
precision where the device has it, and what a sequence gets does not depend on what else is packed, to the bit. All of
it is traced by torch.compile. Boundaries are checked on the CPU only: no device is waited for.

Legend: M tokens laid end to end, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pekoe.kernels.sequence import torch_sequence
from pekoe.kernels.sequence.reference import SINGLE_ONLY

Function = TypeVar("Function", bound=Callable[..., Any])


def _arrays_too(first: str) -> Callable[[Function], Function]:
    """numpy arrays go in as tensors on the same memory (one that is read-only or runs backwards is copied); where the
    argument `first` is an array the results come back as arrays."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            result = function(*map(_tensor, given), **{name: _tensor(value) for name, value in named.items()})
            if not isinstance(given[0] if given else named.get(first), np.ndarray):
                return result
            return tuple(part.numpy() for part in result) if isinstance(result, tuple) else result.numpy()

        return call  # type: ignore[return-value]

    return decorate


def _tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy())


@_arrays_too("rewards")
def gae(
    rewards: Any,
    values: Any,
    mask: Any,
    cu_seqlens: Any,
    *,
    discount: float = 1.0,
    lam: Any = 1.0,
    turns: Any = None,
    bootstrap: Any = None,
) -> tuple[Any, Any]:
    """Generalised advantages and returns, both [M] in the dtype of `rewards`.

        delta_i = R_i + discount V_{i+1} - V_i          A_i = delta_i + discount lam A_{i+1}          return = A + V

    A timestep is a token where `mask` [M] is not 0; the others are skipped: they neither discount nor decay, what
    `rewards` [M] and `values` [M] hold there is not added to anything, their advantage is 0 and their return their own
    value. With `turns` [M] a timestep is a turn: a run of active tokens with one number, whatever lies between them;
    its reward is the sum of its tokens' rewards, its value the one at its first token, and all its tokens get its
    advantage. Without `values` (None) they are 0. `lam` is a number or [S]; `bootstrap` [S] is the value after the last
    token, 0 where it is absent. No gradient flows through.

    Source: Schulman et al. 2016. ValueError naming the argument that does not fit the others.
    """
    count, num_sequences = _sizes("rewards", rewards, cu_seqlens)
    for name, array in (("values", values), ("mask", mask), ("turns", turns)):
        _check_shape(name, array, (count,))
    _check_dtype("rewards", rewards)
    if values is not None and values.dtype != rewards.dtype:
        raise ValueError(f"values: {values.dtype} is not allowed beside rewards of {rewards.dtype}")
    if turns is not None and turns.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"turns: {turns.dtype} is not allowed; int32 or int64")
    lambdas = _per_sequence("lam", lam, num_sequences, rewards.device)
    after = None if bootstrap is None else _per_sequence("bootstrap", bootstrap, num_sequences, rewards.device)
    result: tuple[Tensor, Tensor] = torch.ops.pekoe.gae(
        rewards.detach(), None if values is None else values.detach(), _mask(mask), _bounds(cu_seqlens, rewards),
        float(discount), lambdas, turns, after,
    )  # fmt: skip
    return result


@_arrays_too("values")
def discounted_sums(values: Any, decay: Any, cu_seqlens: Any) -> Any:
    """[M] `x_i = v_i + decay x_{i+1}` inside each sequence of `values` [M]; `decay` is a number or [S]. Differentiable
    in `values`."""
    _, num_sequences = _sizes("values", values, cu_seqlens)
    _check_dtype("values", values)
    by = _per_sequence("decay", decay, num_sequences, values.device)
    return torch.ops.pekoe.discounted_sums(values, by, _bounds(cu_seqlens, values), False)


@_arrays_too("values")
def segment_sum(values: Any, cu_seqlens: Any, mask: Any = None) -> Any:
    """[S] sums of `values` [M] over each sequence, over its tokens where `mask` [M] is not 0 if that is given.
    Differentiable in `values`."""
    return _reduced(values, cu_seqlens, mask, "sum")


@_arrays_too("values")
def segment_mean(values: Any, cu_seqlens: Any, mask: Any = None) -> Any:
    """[S] means of `values` [M] over each sequence, over its tokens where `mask` [M] is not 0 if that is given; 0 where
    there are none. Differentiable in `values`."""
    return _reduced(values, cu_seqlens, mask, "mean")


def _reduced(values: Any, cu_seqlens: Any, mask: Any, how: str) -> Tensor:
    count, _ = _sizes("values", values, cu_seqlens)
    _check_dtype("values", values)
    _check_shape("mask", mask, (count,))
    operator = torch.ops.pekoe.segment_sum if how == "sum" else torch.ops.pekoe.segment_mean
    result: Tensor = operator(values, None if mask is None else _mask(mask), _bounds(cu_seqlens, values))
    return result


def _sizes(name: str, values: Any, cu_seqlens: Any) -> tuple[int, int]:
    if values.dim() != 1:
        raise ValueError(f"{name}: shape {tuple(values.shape)} is not allowed; [M]")
    if len(cu_seqlens) < 1:
        raise ValueError("cu_seqlens: no entries are not allowed; [S+1], from 0")
    return values.shape[0], len(cu_seqlens) - 1


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if array is not None and tuple(array.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(array.shape)} is not allowed; {shape}")


def _check_dtype(name: str, array: Tensor) -> None:
    if array.dtype not in torch_sequence.REALS:
        raise ValueError(f"{name}: {array.dtype} is not allowed; float32 or float64")


def _mask(mask: Tensor) -> Tensor:
    """As bytes that are 0 or not; without a copy where it is bool or uint8."""
    return mask if mask.dtype in (torch.bool, torch.uint8) else mask != 0


def _bounds(cu_seqlens: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(cu_seqlens, device=like.device)


def _per_sequence(name: str, value: Any, num_sequences: int, device: torch.device) -> Tensor:
    """[S] float64 on devices that have it, else float32."""
    dtype = torch.float32 if device.type in SINGLE_ONLY else torch.float64
    if isinstance(value, (int, float)):
        return torch.full((num_sequences,), float(value), dtype=dtype, device=device)
    found = torch.as_tensor(value, device=device)
    if found.dim() == 0:
        found = found.expand(num_sequences)
    _check_shape(name, found, (num_sequences,))
    return found.detach().to(dtype)
