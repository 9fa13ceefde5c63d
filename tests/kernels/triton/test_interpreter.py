"""Triton's kernels in its interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from interpreter import run_checks

pytestmark = pytest.mark.kernels


def test_kernels_equal_their_references(tmp_path: Path) -> None:
    assert run_checks(tmp_path) > 100
