"""The same Triton kernels with triton-ascend: in its interpreter, and lowered to Linalg, which is all that its compiler
does without CANN. Nothing runs on a device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "triton"))
from interpreter import run_checks

from pekoe.kernels.triton_targets import Variant, kernels, linalg, variants

pytestmark = pytest.mark.ascend


def test_this_is_ascends_triton() -> None:
    from triton.backends import backends

    assert list(backends) == ["ascend"]


def test_kernels_equal_their_references_in_the_interpreter(tmp_path: Path) -> None:
    assert run_checks(tmp_path) > 100


def test_kernels_are_lowered_to_linalg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lowered = set()
    for variant in variants("npu"):
        text = linalg(variant)
        assert f"func.func @{variant.kernel.partition(':')[2]}(" in text, str(variant)
        assert " linalg." in text, str(variant)
        assert " tt." not in text, f"{variant}: something of Triton's is left"
        assert 'mix_mode = "aiv"' in text, f"{variant}: not for the vector cores alone"
        lowered.add(variant.kernel)
    assert lowered == set(kernels())


def test_what_cannot_be_lowered_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variant = next(variant for variant in variants("npu") if variant.kernel.endswith(":scan_sums"))
    wrong = Variant(variant.kernel, {**variant.types, "cu_seqlens": "*fp32"}, variant.constants)
    with pytest.raises(Exception, match="scan_sums"):
        linalg(wrong)
