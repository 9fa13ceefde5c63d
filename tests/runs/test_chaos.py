"""Real kills at random instants of tiny runs: nothing is lost or trained on twice (see `scripts/bench/chaos.py`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))

from chaos import SETUPS, Setup, run_setup

SPLIT, SYNCHRONOUS, COLOCATED = SETUPS


@pytest.mark.timeout(400)
@pytest.mark.trainers
@pytest.mark.parametrize(
    ("setup", "kills"),
    [
        pytest.param(SPLIT, 3, id="split"),
        pytest.param(SYNCHRONOUS, 2, id="synchronous"),
        pytest.param(COLOCATED, 6, id="colocated", marks=pytest.mark.slow),
        pytest.param(SYNCHRONOUS, 8, id="synchronous, more", marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_instants_nothing_is_lost_or_trained_on_twice(
    setup: Setup, kills: int, tmp_path: Path
) -> None:
    """With eta 0 also the sequence of groups and the final weights are those of an undisturbed run, bit for bit."""
    seed = int(os.environ.get("PEKOE_CHAOS_SEED", int.from_bytes(os.urandom(2))))
    result = run_setup(tmp_path, setup, kills, seed)
    told = f"PEKOE_CHAOS_SEED={seed} {result.world.kills}"
    assert len(result.world.kills) == kills, told
    verdict = result.verdict
    assert (verdict.lost, verdict.trained_twice, verdict.out_of_order, verdict.problems) == (0, 0, 0, []), told
    assert verdict.steps >= 8, told
    if setup.eta == 0:
        assert result.weights_equal, told
