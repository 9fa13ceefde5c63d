"""Two real ranks give what one gives: `TrainerGroup` is the `Reduction` that the algorithm asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gloo_rank import compute, rows

from pekoe.pipeline.algorithm.reduction import OneRank

PROGRAM = Path(__file__).parent / "gloo_rank.py"


@pytest.mark.trainers
def test_two_ranks_equal_one(tmp_path):
    command = [sys.executable, str(PROGRAM), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank), "2", str(tmp_path / f"{rank}.npz")]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    made = list(rows())
    (advantages, keep), sums = compute(made, OneRank())
    ends = np.cumsum([len(row[1].tokens) for row in made])
    for number in range(2):
        found = np.load(tmp_path / f"{number}.npz")
        places = [np.arange(end - len(row[1].tokens), end) for row, end in zip(made, ends, strict=True)][number::2]
        mine = np.concatenate(places)
        np.testing.assert_allclose(found["advantages"], advantages[mine], rtol=1e-6)
        np.testing.assert_array_equal(found["keep"], keep[mine])
        assert dict(zip(found["names"], found["sums"], strict=True)) == pytest.approx(sums, rel=1e-12, abs=1e-12)
    assert 0 < keep.mean() < 1
