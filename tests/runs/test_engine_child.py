"""Whole runs whose engine is in a child process of its rank: one that dies there, and one whose rank does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rollout"))

from child_worlds import alive, engine_processes, eventually
from run_command import base_overrides, run
from test_death import heartbeats, start, wait_for_step

pytestmark = pytest.mark.trainers


@pytest.mark.timeout(200)
def test_a_colocated_run_with_an_engine_in_a_child(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "child"), "allocation": "hf:d1|fsdp:d1",
        "rollout.engine_process": "child", "rollout.max_head_offpolicyness": 0, "total_train_steps": 3,
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text
    assert len(outcome.steps) == 3
    rank = int(heartbeats(outcome.run)[0]["pid"])
    assert eventually(lambda: not engine_processes(rank))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_outlives_its_engines_process_but_not_the_other_way_round(
    tmp_path: Path, tiny_model: Path, sums: Path, how: signal.Signals
) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "child"), "rollout.engine_process": "child",
        "total_train_epochs": 400, "total_train_steps": 2000, "cluster.silence_seconds": 10,
    }  # fmt: skip
    process = start(tmp_path, overrides)
    run_path = tmp_path / "test" / "child"
    wait_for_step(run_path, 2, process)
    rank = int(heartbeats(run_path)[1]["pid"])
    (first,) = engine_processes(rank)
    os.kill(first, how)
    assert eventually(lambda: bool(engine_processes(rank) - {first}), 90), "no other engine was started"
    assert not alive(first)
    (second,) = engine_processes(rank)
    last = len((run_path / "metrics" / "metrics.jsonl").read_text().splitlines())
    wait_for_step(run_path, last + 20, process)
    os.kill(rank, signal.SIGKILL)
    assert eventually(lambda: not alive(second))
    assert process.wait(timeout=120) == 1
