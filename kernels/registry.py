"""Every kernel: operation -> its implementations, one line each; which one runs where.

An implementation is a function with the operation's signature. `reference` says what the operation means; the others
are only faster. The first one that is there for a device type runs, and that choice is logged once. One that belongs
there and cannot be used (a native library that was not built) is a warning, once, that says how to get it.

The environment variable PEKOE_KERNELS overrides the choice: `logprob=triton,sequence.gae=reference` names an
implementation for a room, or for one of its operations, which wins over its room. A room's word holds for those of its
operations that have such an implementation, on every device type; the others choose for themselves. An operation,
room or implementation that does not exist, one that cannot be used here, and one that does not run on the device type
that is asked for are errors. Triton runs on CPU tensors only in its interpreter (TRITON_INTERPRET=1), and only by name.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
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


def _torch(target: str) -> Implementation:
    return Implementation("torch", f"pekoe.kernels.{target}", ANYWHERE)


def _reference(target: str, devices: tuple[str, ...] = ("cpu",)) -> Implementation:
    return Implementation("reference", f"pekoe.kernels.{target}", devices)


OPERATIONS: dict[str, tuple[Implementation, ...]] = {
    "packing.best_fit": (_native("packing.native:best_fit"), _reference("packing.reference:best_fit")),
    "packing.karmarkar_karp": (
        _native("packing.native:karmarkar_karp"),
        _reference("packing.reference:karmarkar_karp"),
    ),
    "packing.equal_count": (_native("packing.native:equal_count"), _reference("packing.reference:equal_count")),
    "packing.joint_plan": (_native("packing.native:joint_plan"), _reference("packing.reference:joint_plan")),
    "packing.pack": (
        _native("packing.native_ragged:pack"),
        _triton("packing.triton_ragged:pack"),
        _reference("packing.reference_ragged:pack", ANYWHERE),
    ),
    "packing.unpack": (
        _native("packing.native_ragged:unpack"),
        _triton("packing.triton_ragged:unpack"),
        _reference("packing.reference_ragged:unpack", ANYWHERE),
    ),
    "packing.position_ids": (
        _native("packing.native_ragged:position_ids"),
        _triton("packing.triton_ragged:position_ids"),
        _reference("packing.reference_ragged:position_ids", ANYWHERE),
    ),
    "packing.sequence_index": (
        _native("packing.native_ragged:sequence_index"),
        _triton("packing.triton_ragged:sequence_index"),
        _reference("packing.reference_ragged:sequence_index", ANYWHERE),
    ),
    "packing.zigzag_split": (
        _native("packing.native_ragged:zigzag_split"),
        _reference("packing.reference_ragged:zigzag_split"),
    ),
    "packing.prefix_trie": (
        _native("packing.native_trie:prefix_trie"),
        _reference("packing.reference_trie:prefix_trie"),
    ),
    "packing.block_map": (_native("packing.native_trie:block_map"), _reference("packing.reference_trie:block_map")),
    "sequence.gae": (
        _native("sequence.native:gae"),
        _triton("sequence.triton_sequence:gae"),
        _reference("sequence.reference:gae", ANYWHERE),
    ),
    "sequence.discounted_sums": (
        _native("sequence.native:discounted_sums"),
        _triton("sequence.triton_sequence:discounted_sums"),
        _reference("sequence.reference:discounted_sums", ANYWHERE),
    ),
    "sequence.segment_sum": (
        _native("sequence.native:segment_sum"),
        _triton("sequence.triton_sequence:segment_sum"),
        _reference("sequence.reference:segment_sum", ANYWHERE),
    ),
    "sequence.segment_mean": (
        _native("sequence.native:segment_mean"),
        _triton("sequence.triton_sequence:segment_mean"),
        _reference("sequence.reference:segment_mean", ANYWHERE),
    ),
    "logprob.hidden_statistics": (
        _native("logprob.native:hidden_statistics"),
        _triton("logprob.triton_logprob:hidden_statistics"),
        _torch("logprob.torch_tiles:hidden_statistics"),
        _reference("logprob.reference:hidden_statistics", ANYWHERE),
    ),
    "logprob.hidden_gradients": (
        _native("logprob.native:hidden_gradients"),
        _triton("logprob.triton_logprob:hidden_gradients"),
        _torch("logprob.torch_tiles:hidden_gradients"),
        _reference("logprob.reference:hidden_gradients", ANYWHERE),
    ),
    "logprob.logits_statistics": (
        _native("logprob.native:logits_statistics"),
        _triton("logprob.triton_logprob:logits_statistics"),
        _torch("logprob.torch_tiles:logits_statistics"),
        _reference("logprob.reference:logits_statistics", ANYWHERE),
    ),
    "logprob.logits_gradient": (
        _native("logprob.native:logits_gradient"),
        _triton("logprob.triton_logprob:logits_gradient"),
        _torch("logprob.torch_tiles:logits_gradient"),
        _reference("logprob.reference:logits_gradient", ANYWHERE),
    ),
}
"""In the order of preference."""


class KernelError(ValueError):
    """An override names what is not there, or nothing runs on a device type."""


_lock = threading.Lock()
_chosen: dict[tuple[str, str, str], Callable[..., Any]] = {}


def kernel(operation: str, device_type: str = "cpu") -> Callable[..., Any]:
    """The implementation of an operation that runs on a device type, within a microsecond once it was chosen.
    KernelError for an override that cannot be met."""
    overrides = os.environ.get(VARIABLE, "")
    function = _chosen.get((operation, device_type, overrides))
    if function is None:
        with _lock:
            function = _chosen.get((operation, device_type, overrides))
            if function is None:
                function = _choose(operation, device_type, overrides)
                _chosen[operation, device_type, overrides] = function
    return function


def _choose(operation: str, device_type: str, overrides: str) -> Callable[..., Any]:
    row, passed_over = choice(operation, device_type, overrides)
    for name, reason in passed_over:
        _warn_once(name, reason)
    by = f" (by {VARIABLE})" if _wanted_name(operation, overrides) else ""
    logger.info("kernel %s on %s: %s%s", operation, device_type, row.name, by)
    return load(row)


@cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("%s kernels cannot be used; slower ones run in their place: %s", name, reason)


def choice(operation: str, device_type: str, overrides: str) -> tuple[Implementation, list[tuple[str, str]]]:
    """The implementation that runs, and those preferred to it that cannot be used here: (name, why). KernelError where
    there is none, or an override cannot be met."""
    if operation not in OPERATIONS:
        raise KernelError(f"kernel {operation!r}: there is no such operation; allowed: {', '.join(sorted(OPERATIONS))}")
    name = _wanted_name(operation, overrides)
    if name is not None:
        return _wanted(operation, device_type, name), []
    passed_over: list[tuple[str, str]] = []
    for row in OPERATIONS[operation]:
        if device_type in row.devices:
            reason = why_not_on(row, device_type)
            if reason is None:
                return row, passed_over
            passed_over.append((row.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise KernelError(
        f"kernel {operation}: there is no implementation for {device_type!r}" + (f" ({reasons})" if reasons else "")
    )


def _wanted_name(operation: str, overrides: str) -> str | None:
    """What an override names for an operation that has it."""
    if not overrides:
        return None
    wanted = wanted_names(overrides)
    if operation in wanted:
        return wanted[operation]
    name = wanted.get(room_of(operation))
    return name if name in {row.name for row in OPERATIONS[operation]} else None


def _wanted(operation: str, device_type: str, name: str) -> Implementation:
    (row,) = (row for row in OPERATIONS[operation] if row.name == name)
    reason = why_not_on(row, device_type) if device_type in row.devices else why_not(row)
    if reason is not None:
        raise KernelError(f"{VARIABLE}: {operation}={name} cannot be used here: {reason}")
    if device_type not in device_types(row):
        able = ", ".join(row.name for row in OPERATIONS[operation] if device_type in device_types(row))
        hint = "; or set TRITON_INTERPRET=1" if name == "triton" and device_type == "cpu" else ""
        raise KernelError(f"{VARIABLE}: {operation}={name} does not run on {device_type!r}; allowed: {able}{hint}")
    return row


def check_overrides() -> None:
    """Before anything starts: KernelError for a PEKOE_KERNELS that names what does not exist. Imports no kernel."""
    wanted_names(os.environ.get(VARIABLE, ""))


def wanted_names(overrides: str) -> Mapping[str, str]:
    """Operation or room -> implementation, of the text of PEKOE_KERNELS. KernelError naming what is not allowed."""
    names_of: dict[str, set[str]] = {}
    for operation, rows in OPERATIONS.items():
        names = {row.name for row in rows}
        names_of[operation] = names
        names_of.setdefault(room_of(operation), set()).update(names)
    found: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in overrides.split(","))):
        key, _, name = (text.strip() for text in part.partition("="))
        if key not in names_of:
            allowed = ", ".join(sorted(names_of))
            raise KernelError(f"{VARIABLE}: {part!r} is not allowed; NAME=IMPLEMENTATION with NAME one of {allowed}")
        if name not in names_of[key]:
            allowed = ", ".join(sorted(names_of[key]))
            raise KernelError(f"{VARIABLE}: {key}={name} is not allowed; {key} has {allowed}")
        if found.setdefault(key, name) != name:
            raise KernelError(f"{VARIABLE}: {key} is named twice, {found[key]} and {name}")
    return found


def room_of(operation: str) -> str:
    """`packing` of `packing.best_fit`."""
    return operation.partition(".")[0]


def device_types(row: Implementation) -> tuple[str, ...]:
    """Where an implementation runs when it is named: Triton's interpreter takes CPU tensors, too."""
    if row.name == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return (*row.devices, "cpu")
    return row.devices


@cache
def why_not(row: Implementation) -> str | None:
    """Why an implementation cannot be used here; None when it can. Whatever its import raises is a reason: a package
    that does not fit another one fails in many ways."""
    try:
        if row.name == "native":
            _load_library()
        importlib.import_module(row.target.partition(":")[0])
    except OSError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def why_not_on(row: Implementation, device_type: str) -> str | None:
    """As `why_not`, on a device type that it is made for. Triton asks for a C compiler, Python's headers and the driver
    only when it launches: the first kernel on a device type is a trial."""
    reason = why_not(row)
    if reason is None and row.name == "triton" and device_type != "cpu":
        reason = _why_no_launch(device_type)
    return reason


@cache
def _why_no_launch(device_type: str) -> str | None:
    try:
        from pekoe.kernels.triton_launch import try_launch

        try_launch(device_type)
    except Exception as error:
        return f"a kernel cannot be launched: {type(error).__name__}: {error}"
    return None


def _load_library() -> None:
    from pekoe.kernels.native.native_library import native_library

    native_library()


def load(row: Implementation) -> Callable[..., Any]:
    """The function itself; raises what its import raises."""
    module, _, name = row.target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
