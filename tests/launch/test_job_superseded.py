"""A real run that another driver has taken over, as after a node was cut off the network, ends by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runs"))

from run_command import base_overrides, command, environment

from pekoe.launch.fence import raise_fence
from pekoe.pipeline.run_directory import RunDirectory


def newest_ledger(run: RunDirectory) -> Path | None:
    return max(run.ledger.glob("step-*.json"), default=None)


@pytest.mark.slurm
def test_a_run_that_was_taken_over_writes_no_more(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "old"), "total_train_steps": 1000, "total_train_epochs": 100,
    }  # fmt: skip
    (tmp_path / "empty.yaml").write_text("{}\n")
    run = RunDirectory(tmp_path / "test" / "old")
    process = subprocess.Popen(
        command(tmp_path / "empty.yaml", overrides), env=environment(), cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while newest_ledger(run) is None:
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
        assert raise_fence(run) == 1
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, output
    record = json.loads((run.errors / "attempt-0.json").read_text())
    assert "SupersededError: attempt 1 of" in record["error"]
    last = newest_ledger(run)
    assert last is not None
    assert last.stat().st_mtime <= record["time"] + 1.0
