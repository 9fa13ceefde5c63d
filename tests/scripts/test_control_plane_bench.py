"""The benchmarks of the control plane run, and what they check holds; the targets are theirs to measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import startup  # noqa: E402

from pekoe.launch.local import find_mpiexec, mpiexec_arguments  # noqa: E402


def test_a_thousand_virtual_ranks_never_exceed_the_bound_of_admission() -> None:
    settings = {"seconds": 1.5, "bare_notices": 2000, "batch": 512, "heartbeat_seconds": 0.5}
    program = [str(BENCH / "control_plane_world.py"), json.dumps(settings)]
    done = subprocess.run(
        mpiexec_arguments(find_mpiexec(), 3, program), capture_output=True, text=True, timeout=240, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["violations"] == 0
    assert found["admissions"] > 3 * 512
    assert found["highest_share"] == 1.0, "the bound is reached, and never passed"
    assert found["staleness"] == 2
    assert found["ranks_heard"] == 1000
    assert 0 <= found["oldest_heartbeat_seconds"] < 60
    assert found["notices"] / found["seconds"] > 50, "a machine under load; the benchmark holds the real target"


def test_the_phases_of_a_start_add_up() -> None:
    found = startup.measure(startup.by_mpiexec, 2)
    assert found["whole"] > found["joined"] > 0
    spent = sum(found[phase] for phase in startup.PHASES)
    assert 0 < spent < 2 * found["joined"] + 0.1, "each phase is that of the slowest rank"
    assert found["bare"] > 0
