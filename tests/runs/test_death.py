"""Killing any rank, or raising in any rank, ends the world soon with one error record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import base_overrides, command, environment, run

from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory

LIMIT = 45.0
"""Well below `cluster.silence_seconds`."""


def start(root: Path, overrides: dict[str, Any]) -> subprocess.Popen[bytes]:
    config = root / "empty.yaml"
    config.write_text("{}\n")
    log = (root / "output.txt").open("wb")
    return subprocess.Popen(
        command(config, overrides), env=environment(), cwd=root, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for_step(run_path: Path, step: int, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    metrics = run_path / "metrics" / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        assert process.poll() is None, "the run ended early"
        time.sleep(0.05)
    raise AssertionError(f"step {step} did not come in {seconds} s")


def heartbeats(run_path: Path) -> dict[int, dict[str, Any]]:
    found = read_heartbeats(RunDirectory(run_path))
    return {
        item.heartbeat.rank: {**msgspec.to_builtins(item.heartbeat), "attempt": item.attempt, "time": item.time}
        for item in found
    }


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def error_records(run_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run_path / "errors").glob("*.json"))]


def assert_told_of(victim: int, run_path: Path) -> None:
    (record,) = error_records(run_path)
    assert record["rank"] == victim
    assert "9" in json.dumps(record)
    assert record["role"] == ("trainer" if victim == 0 else "rollout")
    assert record["phase"]


def assert_gone(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_alive(pid) for pid in pids)


def test_a_killed_rollout_rank_ends_the_world(killed_run: Any) -> None:
    assert killed_run.seconds < LIMIT
    assert_told_of(1, killed_run.killed)
    assert_gone(killed_run.pids)


@pytest.mark.timeout(240)
def test_a_killed_trainer_rank_ends_the_world(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "killed"),
        "total_train_epochs": 400,
        "total_train_steps": 2000,
    }
    process = start(tmp_path, overrides)
    run_path = tmp_path / "test" / "killed"
    wait_for_step(run_path, 3, process)
    beats = heartbeats(run_path)
    os.kill(int(beats[0]["pid"]), signal.SIGKILL)
    began = time.monotonic()
    code = process.wait(timeout=120)
    took = time.monotonic() - began
    assert code not in (0, 75), (tmp_path / "output.txt").read_text()[-3000:]
    assert took < LIMIT
    assert_told_of(0, run_path)
    assert_gone([int(beat["pid"]) for beat in beats.values()])


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("what", "rank", "text"),
    [
        ({"workflow.name": "broken_workflow:UnbuildableWorkflow"}, 1, "cannot build this workflow"),
        ({"train_dataset.type": "broken_dataset:HeadOnly"}, 0, "the head cannot use this data"),
    ],
)
def test_an_exception_in_any_rank_ends_the_world(
    what: dict[str, Any], rank: int, text: str, tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    overrides = {**base_overrides(tmp_path, tiny_model, sums, "raised"), **what}
    outcome = run(tmp_path, overrides, timeout=120)
    assert outcome.code == 1, outcome.text
    (record,) = error_records(outcome.run)
    assert record["rank"] == rank
    assert text in json.dumps(record)
