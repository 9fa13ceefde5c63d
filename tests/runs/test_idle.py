"""Ranks of a real run that wait burn no core, and still stop at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import base_overrides
from test_death import heartbeats, start

WINDOW = 5.0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.timeout(240)
def test_waiting_ranks_use_no_cpu_and_stop_on_sigterm(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "idle"), "workflow.name": "sleeping_workflow:SleepingWorkflow",
        "cluster.heartbeat_seconds": 2.0,
    }  # fmt: skip
    process = start(tmp_path, overrides)
    run_path = tmp_path / "test" / "idle"
    deadline = time.monotonic() + 90
    while not any("batch" in beat["phase"] for beat in heartbeats(run_path).values()) and time.monotonic() < deadline:
        assert process.poll() is None, (tmp_path / "output.txt").read_text()[-3000:]
        time.sleep(0.1)
    pids = [int(beat["pid"]) for beat in heartbeats(run_path).values()]
    assert len(pids) == 2
    time.sleep(1.0)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(WINDOW)
    used = [now - then for now, then in zip([cpu_seconds(pid) for pid in pids], before, strict=True)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 75
    assert max(used) < 0.5, used
