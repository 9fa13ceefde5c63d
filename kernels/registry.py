"""Every kernel: operation -> its implementations, one line each; which one runs where.

An implementation is a function with the operation's signature. `reference` says what the operation means; the others
are only faster. The first one that is there for a device type runs, and that choice is logged once. The environment
variable PEKOE_KERNELS overrides it: `logprob=triton,sequence.gae=reference` names an implementation for a room, or for
one of its operations; one that is not there is an error.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

VARIABLE = "PEKOE_KERNELS"


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation."""

    name: str
    """`native`, `triton`, `torch`, `reference`."""
    target: str
    """`module:function`; nothing is imported until it is chosen."""
    devices: tuple[str, ...]
    """Device types (torch's names) that it runs on."""


ANYWHERE = ("cpu", "cuda", "npu")


def _native(target: str) -> Implementation:
    return Implementation("native", f"pekoe.kernels.{target}", ("cpu",))


def _triton(target: str) -> Implementation:
    return Implementation("triton", f"pekoe.kernels.{target}", ("cuda", "npu"))


def _reference(target: str, devices: tuple[str, ...] = ("cpu",)) -> Implementation:
    return Implementation("reference", f"pekoe.kernels.{target}", devices)


OPERATIONS: dict[str, tuple[Implementation, ...]] = {}
"""In the order of preference."""


class KernelError(ValueError):
    """An override names what is not there."""


def kernel(operation: str, device_type: str = "cpu") -> Callable[..., Any]:
    """The implementation of an operation that runs on a device type. KernelError for an override that cannot be
    met."""
    return _chosen(operation, device_type, os.environ.get(VARIABLE, ""))


@cache
def _chosen(operation: str, device_type: str, overrides: str) -> Callable[..., Any]:
    rows = OPERATIONS[operation]
    wanted = wanted_names(overrides)
    name = wanted.get(operation, wanted.get(operation.partition(".")[0]))
    if name is not None:
        return _wanted(operation, device_type, name)
    for row in rows:
        if device_type in row.devices and why_not(row) is None:
            logger.info("kernel %s on %s: %s", operation, device_type, row.name)
            return load(row)
    raise KernelError(f"kernel {operation}: there is no implementation for {device_type!r}")


def _wanted(operation: str, device_type: str, name: str) -> Callable[..., Any]:
    allowed = ", ".join(row.name for row in OPERATIONS[operation] if device_type in row.devices)
    for row in OPERATIONS[operation]:
        if row.name == name and device_type in row.devices:
            reason = why_not(row)
            if reason is not None:
                raise KernelError(f"{VARIABLE}: {operation}={name} is not available here: {reason}")
            return load(row)
    raise KernelError(f"{VARIABLE}: {operation}={name} is not allowed on {device_type}; allowed: {allowed}")


def wanted_names(overrides: str) -> Mapping[str, str]:
    """Operation or room -> implementation, of the text of PEKOE_KERNELS. KernelError naming what cannot be read."""
    rooms = {name.partition(".")[0] for name in OPERATIONS}
    found: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in overrides.split(","))):
        key, equals, name = part.partition("=")
        if not equals or key not in rooms | set(OPERATIONS):
            allowed = ", ".join(sorted(rooms | set(OPERATIONS)))
            raise KernelError(f"{VARIABLE}: {part!r} is not allowed; NAME=IMPLEMENTATION with NAME one of {allowed}")
        found[key] = name
    return found


def why_not(row: Implementation) -> str | None:
    """Why an implementation cannot be used here; None when it can."""
    try:
        load(row)
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(row: Implementation) -> Callable[..., Any]:
    """ImportError or OSError where what it needs is missing."""
    module, _, name = row.target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
