"""A real run told to stop while it starts up (before MPI, in MPI_Init, while loading), again and again, then let go."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import base_overrides, command, environment, run
from test_death import error_records

SECONDS_IN = [(0.0, signal.SIGTERM), (0.7, signal.SIGHUP), (1.5, signal.SIGUSR2), (3.0, signal.SIGTERM)]
"""After the launcher has said the run directory, ranks come up: imports, MPI, then torch, models, groups."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_stopped_while_it_starts_loses_nothing(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {**base_overrides(tmp_path, tiny_model, sums, "early"), "total_train_steps": 2}
    path = tmp_path / "test" / "early"
    config = tmp_path / "empty.yaml"
    config.write_text("{}\n")
    for number, (seconds, kind) in enumerate(SECONDS_IN):
        arguments = command(config, overrides)
        if number:
            arguments = [*arguments[:4], "--resume", str(path)]
        process = subprocess.Popen(
            arguments, env=environment(), cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        said = next(line for line in process.stdout if "run directory" in line)
        assert f"attempt {number}" in said
        time.sleep(seconds + 0.3)
        began = time.monotonic()
        process.send_signal(kind)
        time.sleep(0.05)
        process.send_signal(kind)
        rest = process.communicate(timeout=90)[0]
        assert process.returncode == 75, rest
        assert time.monotonic() - began < 60
        assert rest.count("stopping: the step ends") == 1
        assert not error_records(path)
    outcome = run(tmp_path, overrides, resume=True)
    assert outcome.code == 0, outcome.text
    assert [line["step"] for line in outcome.steps] == [1, 2]
    assert len({group for step in outcome.consumed() for group in step}) == 8
