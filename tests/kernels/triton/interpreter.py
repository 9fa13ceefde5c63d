"""Runs `interpreted/check_*.py` in a process of its own: Triton is imported there with its interpreter asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pekoe.kernels.registry import VARIABLE

CHECKS = Path(__file__).with_name("interpreted")


def run_checks(cache: Path) -> int:
    """How many there were; all passed. `cache` is Triton's, which stays empty."""
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, sorted(CHECKS.glob("check_*.py")))],
        env={**kept, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        cwd=CHECKS.parents[3],
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(cache.iterdir()) == [], "the interpreter compiles nothing"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    return int(passed.group(1))
