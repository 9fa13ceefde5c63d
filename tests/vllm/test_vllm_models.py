"""Families of models: each generates, means the same by a log-prob as transformers does, and takes new weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from model_families import FAMILIES, check, serve

pytestmark = pytest.mark.vllm

VISION = "qwen2.5-vl"
TORCHVISION = Path(sys.prefix) / "torchvision"
"""Where `scripts/setup_venv.sh vllm` puts it: beside the environment's packages, which it would break."""


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {VISION}))
def test_family_samples_scores_and_takes_new_weights(family: str, tmp_path: Path, tiny_model: Path) -> None:
    engine = serve(family, tmp_path / family, tiny_model)
    try:
        check(family, engine)
    finally:
        engine.close()


@pytest.mark.skipif(not TORCHVISION.is_dir(), reason="no torchvision beside this environment (setup_venv.sh vllm)")
def test_text_of_a_vision_language_model(tmp_path: Path, tiny_model: Path) -> None:
    """In a process of its own, in which torchvision can be imported."""
    program = Path(__file__).with_name("model_families.py")
    paths = [str(Path(__file__).parent / "vision"), str(TORCHVISION)]
    done = subprocess.run(
        [sys.executable, str(program), VISION, str(tmp_path / "vision"), str(tiny_model)], timeout=120, text=True,
        env={**os.environ, "PYTHONPATH": ":".join(paths)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.splitlines()[-1] == f"checked {VISION}"
