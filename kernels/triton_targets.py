"""Compiles the Triton kernels ahead of time, for devices that need not be there.

    Variant (kernel, types, constants) ─► cuda_binary ─► PTX and cubin        triton, for sm_80, sm_90, sm_100, …
                                      └─► linalg ─► Linalg                    triton-ascend, without CANN

VARIANTS has every kernel, with the constants and types that its callers give it. Nothing at run time needs this module:
it is how a machine without devices finds out that a kernel compiles for them.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MODULES = ("packing.triton_ragged", "sequence.triton_sequence", "logprob.triton_logprob")
CAPABILITIES = {80: 163, 90: 227, 100: 227}
"""Compute capability -> KiB of shared memory that a program may have (Ampere, Hopper, Blackwell)."""
ASCEND = "Ascend910B"
ALIGNMENT = 16


@dataclass(frozen=True)
class Variant:
    """A kernel as one caller has it compiled."""

    kernel: str
    """`module:function` below pekoe.kernels."""
    types: Mapping[str, str]
    """Argument -> its type in Triton's words (`*bf16`, `i32`); the others are in `constants`."""
    constants: Mapping[str, Any]
    num_warps: int = 4
    on: tuple[str, ...] = ("cuda", "npu")

    def __str__(self) -> str:
        words = [
            self.kernel.partition(":")[2],
            *(f"{name}={kind}" for name, kind in self.types.items() if kind != "i32"),
        ]
        return " ".join([*words, *(f"{name}={value}" for name, value in self.constants.items())])

    @property
    def function(self) -> Any:
        module, _, name = self.kernel.partition(":")
        return getattr(importlib.import_module(f"pekoe.kernels.{module}"), name)


def kernels() -> Iterator[str]:
    """`module:function` of every kernel in MODULES; what begins with `_` is called by kernels only."""
    from triton.runtime.jit import JITFunction

    for module in MODULES:
        for name, value in inspect.getmembers(importlib.import_module(f"pekoe.kernels.{module}")):
            if isinstance(value, JITFunction) and not name.startswith("_"):
                yield f"{module}:{name}"


@dataclass(frozen=True)
class CudaBinary:
    """What a GPU of NVIDIA loads."""

    ptx: str
    cubin: bytes
    shared_bytes: int


def cuda_binary(variant: Variant, capability: int) -> CudaBinary:
    """Compiles a kernel for a compute capability (90: sm_90)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.function.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", ALIGNMENT]] for i, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(
        variant.function, signature, {(names.index(name),): value for name, value in variant.constants.items()}, aligned
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": variant.num_warps}
    )
    return CudaBinary(compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared)


def linalg(variant: Variant) -> str:
    """Lowers a kernel to Linalg by triton-ascend's compiler: all that it does without CANN. RuntimeError with the
    compiler's words."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    target = GPUTarget("npu", ASCEND, 0)
    backend = make_backend(target)
    types = {name: variant.types[name] for name in variant.function.arg_names if name in variant.types}
    source = ASTSource(variant.function, types, constants=dict(variant.constants))
    options = backend.parse_options({"num_warps": variant.num_warps, **source.parse_options()})
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": source.hash(), "target": target, **vars(options)}
    module = stages["ttir"](module, metadata)
    try:
        lowered: str = stages["ttadapter"](module, metadata)
    except Exception as error:
        words = getattr(error, "stderr", None) or str(error).encode()
        raise RuntimeError(f"{variant}: {words.decode(errors='replace')}") from error
    return lowered


def _tiles() -> Iterator[Variant]:
    """(dtype of the tile, of the slopes, of the bias)"""
    from pekoe.kernels.logprob.triton_logprob import BLOCK, NUM_WARPS

    module = "logprob.triton_logprob"
    numbers = {"num_columns": "i32", "row_stride": "i32", "slope_stride": "i32", "first": "i32"}
    for tile, slopes, bias in (
        ("fp32", "fp32", None), ("fp32", "fp32", "fp32"), ("fp32", "bf16", None), ("fp32", "bf16", "bf16"),
        ("bf16", "bf16", None), ("fp16", "fp16", None),
    ):  # fmt: skip
        optional = {"bias": None if bias is None else f"*{bias}"}
        constants = {"has_bias": bias is not None, "block": BLOCK}
        types = {"tile": f"*{tile}", "targets": "*i32", "inverse_temperature": "fp32", **numbers}
        rows = dict.fromkeys(("maximum", "a", "b", "c"), "*fp32")
        yield _optional(
            f"{module}:slope_tile", {**types, **rows, "slopes": f"*{slopes}"}, optional, constants, num_warps=NUM_WARPS
        )
        rows = dict.fromkeys(("maximum", "total", "moment", "picked"), "*fp32")
        del types["slope_stride"]
        for moments in (False, True):
            merged = {**constants, "moments": moments}
            yield _optional(f"{module}:merge_tile", {**types, **rows}, optional, merged, num_warps=NUM_WARPS)


def _scans() -> Iterator[Variant]:
    from pekoe.kernels.sequence.triton_sequence import BLOCK

    module = "sequence.triton_sequence"
    for real, kind in (("fp32", "fp64"), ("fp64", "fp64"), ("fp32", "fp32")):
        on = ("npu",) if kind == "fp32" else ("cuda",)
        for from_left in (False, True):
            types = {"values": f"*{real}", "decays": f"*{kind}", "cu_seqlens": "*i32", "out": f"*{real}"}
            yield Variant(f"{module}:scan_sums", types, {"from_left": from_left, "block": BLOCK}, on=on)
        for has_mask, is_mean in itertools.product((False, True), repeat=2):
            types = {"values": f"*{real}", "cu_seqlens": "*i32", "out": f"*{real}"}
            constants = {"has_mask": has_mask, "is_mean": is_mean, "is_double": kind == "fp64", "block": BLOCK}
            yield _optional(f"{module}:sum_segments", types, {"mask": "*u8" if has_mask else None}, constants, on)
        for has_values, has_turns in itertools.product((False, True), repeat=2):
            types = {
                "rewards": f"*{real}", "mask": "*u8", "cu_seqlens": "*i32", "decays": f"*{kind}", "gains": f"*{kind}",
                "bootstrap": f"*{kind}", "advantages": f"*{real}", "returns": f"*{kind if has_turns else real}",
            }  # fmt: skip
            optional = {"values": f"*{real}" if has_values else None, "turns": "*i32" if has_turns else None}
            constants = {"has_values": has_values, "has_turns": has_turns, "block": BLOCK}
            yield _optional(f"{module}:scan_gae", types, optional, constants, on)
    for kind, on in (("fp64", ("cuda",)), ("fp32", ("npu",))):
        for has_values in (False, True):
            types = {
                "mask": "*u8", "turns": "*i32", "mask_before": "*u8", "turns_before": "*i32", "cu_seqlens": "*i32",
                "advantages": f"*{kind}", "returns": f"*{kind}",
            }  # fmt: skip
            optional = {"values": f"*{kind}" if has_values else None}
            constants = {"has_values": has_values, "block": BLOCK}
            yield _optional(f"{module}:spread_turns", types, optional, constants, on)


def _copies() -> Iterator[Variant]:
    from pekoe.kernels.packing.triton_ragged import BLOCK

    module = "packing.triton_ragged"
    for integer, has_starts, to_packed in itertools.product(("i8", "i16", "i32", "i64"), (False, True), (False, True)):
        types = {
            "padded": f"*{integer}", "packed": f"*{integer}", "cu_seqlens": "*i64", "fill": f"*{integer}",
            "row_stride": "i32", "length": "i32", "width": "i32", "parts": "i32",
        }  # fmt: skip
        constants = {"has_starts": has_starts, "to_packed": to_packed, "block": BLOCK}
        yield _optional(f"{module}:copy_rows", types, {"starts": "*i64" if has_starts else None}, constants)
    for is_position in (False, True):
        types = {"cu_seqlens": "*i32", "out": "*i32", "first_row": "i32", "parts": "i32"}
        yield Variant(f"{module}:number_tokens", types, {"is_position": is_position, "block": BLOCK})


def _optional(
    kernel: str,
    types: dict[str, str],
    optional: dict[str, str | None],
    constants: dict[str, Any],
    on: tuple[str, ...] = ("cuda", "npu"),
    num_warps: int = 4,
) -> Variant:
    """Arguments whose type is None are not there."""
    given = {name: kind for name, kind in optional.items() if kind is not None}
    absent = {name: None for name, kind in optional.items() if kind is None}
    return Variant(kernel, {**types, **given}, {**constants, **absent}, num_warps, on)


def variants(backend: str) -> list[Variant]:
    """Every kernel as it is compiled for `cuda` or `npu`."""
    found = itertools.chain(_copies(), _scans(), _tiles())
    return [variant for variant in found if backend in variant.on]
