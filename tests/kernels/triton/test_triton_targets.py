"""Every Triton kernel compiles for the GPUs that it is meant for, with no GPU."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pekoe.kernels.triton_targets import CAPABILITIES, MODULES, Variant, cuda_binary, kernels, variants

pytestmark = pytest.mark.kernels
KERNELS = Path(__file__).resolve().parents[3] / "kernels"


def test_every_kernel_has_variants_for_both_vendors() -> None:
    for backend in ("cuda", "npu"):
        assert {variant.kernel for variant in variants(backend)} == set(kernels())


def test_every_module_with_kernels_is_looked_at() -> None:
    found = set()
    for path in KERNELS.rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        if any(ast.unparse(decorator) == "triton.jit" for node in functions for decorator in node.decorator_list):
            found.add(".".join(path.relative_to(KERNELS).with_suffix("").parts))
    assert found == set(MODULES)


@pytest.mark.parametrize("backend", ["cuda", "npu"])
def test_variants_name_every_argument(backend: str) -> None:
    for variant in variants(backend):
        assert {*variant.types, *variant.constants} == set(variant.function.arg_names), str(variant)


@pytest.mark.parametrize("capability", sorted(CAPABILITIES))
def test_kernels_compile(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for variant in variants("cuda"):
        binary = cuda_binary(variant, capability)
        name = variant.kernel.partition(":")[2]
        assert f".visible .entry {name}(" in binary.ptx, str(variant)
        assert f".target sm_{capability}" in binary.ptx, str(variant)
        assert binary.cubin.startswith(b"\x7fELF"), str(variant)
        assert binary.shared_bytes <= CAPABILITIES[capability] << 10, str(variant)


def test_a_kernel_that_does_not_compile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variant = next(variant for variant in variants("cuda") if variant.kernel.endswith(":scan_sums"))
    wrong = Variant(variant.kernel, {**variant.types, "cu_seqlens": "*fp32"}, variant.constants)
    with pytest.raises(Exception, match="scan_sums"):
        cuda_binary(wrong, 90)
