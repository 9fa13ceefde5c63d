"""Log-probs never hold all logits: peaks of resident memory in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels
PROGRAM = Path(__file__).with_name("peak_memory.py")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured by Linux")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_beside_the_gradient_of_the_weight(dtype):
    """Logits would be 256 MiB in float32. The gradient of the hidden states, 1 MiB here, counts."""
    command = [sys.executable, str(PROGRAM), "4096", "64", "16384", dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    forward, backward = map(float, done.stdout.split())
    assert 0 < forward <= 32
    assert 0 < backward <= 64
