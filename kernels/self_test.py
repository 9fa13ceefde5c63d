"""Whether every implementation that can be used here computes what the reference does, on small odd arguments.

A room says in `cases.py` what to try. There `CASES` maps each of its operations in the registry to a function from a
seed to cases:

    def best_fit_cases(seed: int) -> list[Case]:
        numbers = np.random.default_rng(seed)
        return [Case({"lengths": numbers.integers(1, 100, 37), "capacity": 128})]

    CASES = {"packing.best_fit": best_fit_cases}

    Case.arguments ─► reference, on the CPU ─────────────────────────► expected ┐ compared item by item
                  └─► implementation, on its device (tensors move) ──► result   ┘

Results are numbers, numpy arrays, tensors, or tuples, mappings and dataclasses of them. Those that hold whole numbers
are equal or wrong; floating-point ones may differ by `Case.tolerance`. Where `Case.gradients` names arguments, the
gradients of a fixed random weighting of the results belong to the result, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from pekoe.kernels import registry
from pekoe.kernels.registry import OPERATIONS, Implementation

SEEDS = (1, 2, 3)
GUARD = 64
"""Entries on each side of a tensor."""


@dataclass(frozen=True)
class Case:
    """One call of an operation."""

    arguments: Mapping[str, Any]
    """By name: numpy arrays, tensors on the CPU, numbers, None."""
    tolerance: float = 0.0
    """The largest error of a floating-point result, in units of max(1, the largest absolute value expected)."""
    gradients: tuple[str, ...] = ()
    """Floating-point tensors among the arguments whose gradients are compared, too."""


CaseMaker = Callable[[int], Sequence[Case]]


@dataclass(frozen=True)
class Outcome:
    """What came out of the cases of one operation with one implementation on one device type."""

    num_cases: int
    """That were right."""
    max_error: float
    """Of those, in the units of `Case.tolerance`."""
    failure: str | None = None
    """The first case that was wrong."""


def cases_of(operation: str) -> CaseMaker | None:
    """What a room says is to be tried; None where it says nothing."""
    module = f"pekoe.kernels.{registry.room_of(operation)}.cases"
    try:
        table: Mapping[str, CaseMaker] = importlib.import_module(module).CASES
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None
    return table.get(operation)


def run_cases(operation: str, row: Implementation, device_type: str = "cpu", seeds: Sequence[int] = SEEDS) -> Outcome:
    """Runs the cases of an operation against its reference. An exception of the implementation is a failure."""
    make = cases_of(operation)
    if make is None:
        return Outcome(0, 0.0, "no cases")
    reference, function = registry.load(reference_of(operation)), registry.load(row)
    num_cases, max_error = 0, 0.0
    for seed in seeds:
        for number, case in enumerate(make(seed)):
            where = f"seed {seed}, case {number}"
            try:
                expected = results_of(reference, case, "cpu")
                error = largest_error(expected, results_of(function, case, device_type))
            except Exception as failed:
                return Outcome(num_cases, max_error, f"{where}: {type(failed).__name__}: {failed}")
            if error > case.tolerance:
                return Outcome(num_cases, max_error, f"{where}: error {error:.2g}, allowed {case.tolerance:.2g}")
            num_cases, max_error = num_cases + 1, max(max_error, error)
    return Outcome(num_cases, max_error)


def reference_of(operation: str) -> Implementation:
    """What an operation means."""
    (row,) = (row for row in OPERATIONS[operation] if row.name == "reference")
    return row


def results_of(function: Callable[..., Any], case: Case, device_type: str) -> list[np.ndarray[Any, Any]]:
    """Everything that a call gives, in its order; then the gradients."""
    arguments = {name: _placed(value, device_type, name in case.gradients) for name, value in case.arguments.items()}
    leaves = list(_leaves(function(**arguments)))
    if case.gradients:
        _backward(leaves)
        leaves += [arguments[name].grad for name in case.gradients]
    return [_as_array(leaf) for leaf in leaves]


def _placed(value: Any, device_type: str, needs_gradient: bool) -> Any:
    """A copy, so that no call sees what another one did to its arguments. A tensor lies between NaN, or between the
    largest whole numbers: who reads beside it gives another result."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if not hasattr(value, "detach"):
        return value
    import torch

    own, size = value.detach().to(device_type), value.numel()
    poison = float("nan") if own.is_floating_point() else 1 if own.dtype == torch.bool else torch.iinfo(own.dtype).max
    room = own.new_full((size + 2 * GUARD,), poison)
    return room[GUARD : GUARD + size].view(own.shape).copy_(own).requires_grad_(needs_gradient)


def _backward(results: Sequence[Any]) -> None:
    import torch

    weights = torch.Generator().manual_seed(0)
    wanted = [result for result in results if getattr(result, "requires_grad", False)]
    total = sum(
        (result.double() * torch.rand(result.shape, generator=weights, dtype=torch.float64).to(result.device)).sum()
        for result in wanted
    )
    torch.autograd.backward([torch.as_tensor(total)])


def _leaves(result: Any) -> Iterator[Any]:
    if is_dataclass(result) and not isinstance(result, type):
        for field in fields(result):
            yield from _leaves(getattr(result, field.name))
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _leaves(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from _leaves(value)
    elif result is not None:
        yield result


def _as_array(leaf: Any) -> np.ndarray[Any, Any]:
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        # numpy has no bfloat16
        leaf = (leaf.float() if leaf.is_floating_point() and leaf.itemsize == 2 else leaf).numpy()
    return np.asarray(leaf)


def largest_error(expected: Sequence[np.ndarray[Any, Any]], found: Sequence[np.ndarray[Any, Any]]) -> float:
    """Relative to max(1, the largest expected); infinite where types, shapes, whole numbers, or the places of NaN and
    infinity differ."""
    if len(expected) != len(found):
        return float("inf")
    return max((_error(one, other) for one, other in zip(expected, found, strict=True)), default=0.0)


def _error(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(expected, found) else float("inf")
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(found)):
        return float("inf")
    if not np.array_equal(expected[~finite], found[~finite], equal_nan=True):
        return float("inf")
    one, other = expected[finite].astype(np.float64), found[finite].astype(np.float64)
    if not one.size:
        return 0.0
    return float(np.abs(one - other).max() / max(1.0, np.abs(one).max()))
