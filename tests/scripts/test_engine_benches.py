"""The benchmarks of engines and weights run on a tiny model, and what they check before they count holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import generation  # noqa: E402


def test_sides_sample_the_same_work_and_the_engine_agrees_with_the_plain_model(tiny_model: Path) -> None:
    ids = [[3 + row, 4, 5, 6][: 2 + row % 3] for row in range(4)]
    with generation.sides(["generate", "hf"], tiny_model, "float32", 1) as opened:
        assert generation.gap(opened, "hf", ids, 2) < 1e-5
        speeds = generation.compare(opened, ids, generation.long_tail(4, 2, 20), rounds=2)
    assert speeds.keys() == {"generate", "hf"}
    assert all(speed.tokens_per_cpu_second > 0 for speed in speeds.values())
    assert all(side.process.returncode == 0 for side in opened.values())


@pytest.mark.trainers
def test_an_update_by_each_transport_is_measured_in_parts(tiny_model: Path) -> None:
    command = [sys.executable, str(BENCH / "weights.py"), "--quick", "--engines", "hf", "--dtypes", "float32"]
    command += ["--model", str(tiny_model)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    for name in ("collective", "disk"):
        found = figures["float32"]["hf"][name]
        assert found["seconds"] >= found["arrival"] + found["load"] + found["check"] > 0
        assert figures[f"{name}_over_memcpy"] == found["over_memcpy"] > 0
