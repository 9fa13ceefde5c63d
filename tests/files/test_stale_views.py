"""Ranks that see a checkpoint later than the head does: one common decision, no dead-lock, nobody goes without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "runs"))

from run_command import Outcome, base_overrides, environment, run  # noqa: E402


@pytest.mark.timeout(400)
@pytest.mark.trainers
def test_ranks_that_do_not_see_the_checkpoint_yet_go_on_from_it(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "stale"), "allocation": "hf:d1+fsdp:d2",
        "total_train_epochs": 2, "total_train_steps": 2, "train_dataset.batch_size": 4,
    }  # fmt: skip
    first = run(tmp_path, overrides)
    assert first.code == 0, first.text
    marks = tmp_path / "marks"
    marks.mkdir()
    stale = {
        "PYTHONPATH": f"{HERE / 'stale_view'}:{environment()['PYTHONPATH']}",
        "STALE_FOLDER": str(first.run / "checkpoints" / "step-2"),
        "STALE_SECONDS": "3",
        "STALE_MARKS": str(marks),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pekoe.launch.cli", "run", "--resume", str(first.run), "total_train_steps=4"],
        env={**environment(), **stale}, timeout=240, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    outcome = Outcome(done.returncode, done.stdout, first.run)
    assert outcome.code == 0, outcome.text
    assert "rank-1" in os.listdir(marks), "the second trainer rank had no old view"
    assert [(line["step"], line["attempt"]) for line in outcome.steps] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    consumed = [group for step in outcome.consumed() for group in step]
    assert len(consumed) == len(set(consumed)) == 16
    assert not list((outcome.run / "set-aside").glob("checkpoints__*")), "a whole checkpoint was taken for damaged"
