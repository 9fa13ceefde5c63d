"""SIGTERM at any step, resume: the same groups, the same number of steps, nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import KilledRun
from run_command import Outcome, base_overrides, run
from test_death import heartbeats, start, wait_for_step

STEPS = 30


@pytest.mark.timeout(400)
@pytest.mark.parametrize("allocation", ["hf:d1+fsdp:d1", pytest.param("hf:d1|fsdp:d1", marks=pytest.mark.trainers)])
def test_stopped_runs_go_on_where_they_were(allocation: str, tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "stopped"), "allocation": allocation,
        "total_train_epochs": 3, "total_train_steps": STEPS,
    }  # fmt: skip
    run_path = tmp_path / "test" / "stopped"
    process = start(tmp_path, overrides)
    wait_for_step(run_path, 4, process)
    os.kill(int(heartbeats(run_path)[0]["pid"]), signal.SIGTERM)
    assert process.wait(timeout=120) == 75, (tmp_path / "output.txt").read_text()[-3000:]
    first = [int(json.loads(path.read_text())["step"]) for path in (run_path / "ledger").glob("step-*.json")]
    assert 4 <= max(first) < STEPS
    outcome = run(tmp_path, overrides, resume=True)
    assert outcome.code == 0, outcome.text
    assert [line["step"] for line in outcome.steps] == list(range(1, STEPS + 1))
    assert {line["attempt"] for line in outcome.steps} == {0, 1}
    consumed = [group for step in outcome.consumed() for group in step]
    per_epoch = [sorted(group & ((1 << 40) - 1) for group in consumed if group >> 40 == epoch) for epoch in range(3)]
    assert per_epoch == [list(range(40))] * 3


@pytest.mark.timeout(400)
def test_a_run_killed_after_a_checkpoint_forgets_the_abandoned_future(killed_run: KilledRun) -> None:
    outcome = Outcome(0, "", killed_run.resumed)
    assert [line["step"] for line in outcome.steps] == list(range(1, 9))
    assert {line["attempt"] for line in outcome.steps} == {0, 1}
    consumed = [group for step in outcome.consumed() for group in step]
    assert len(consumed) == len(set(consumed)) == 4 * 8


@pytest.mark.timeout(300)
def test_resume_with_only_damaged_checkpoints_is_an_error(tmp_path: Path, killed_run: KilledRun) -> None:
    path = Path(shutil.copytree(killed_run.killed, tmp_path / "test" / "damaged"))
    markers = list((path / "checkpoints").glob("step-*/COMPLETE.json"))
    assert markers
    for marker in markers:
        marker.unlink()
    again = run(tmp_path, {"trial_name": "damaged"}, resume=True)
    assert again.code not in (0, 75)
    assert "checkpoint" in again.text


@pytest.mark.timeout(200)
def test_a_run_that_filtering_ended_early_has_ended_well_when_resumed(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    """Half of the prompts are filtered: 5 full batches of the 10 that the data would give."""
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "filtered"), "workflow.name": "filtering_workflow:HalfOfThem",
        "total_train_steps": 10,
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text
    assert [line["step"] for line in outcome.steps] == [1, 2, 3, 4, 5]
    again = run(tmp_path, overrides, resume=True)
    assert again.code == 0, again.text
    assert again.metrics == outcome.metrics
    assert again.ledger == outcome.ledger
    assert not list((again.run / "errors").iterdir())
