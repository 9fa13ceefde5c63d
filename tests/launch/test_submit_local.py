"""Without Slurm, a submitted run is a process of this machine; its handle is rebuilt by the run directory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pekoe.launch.cli import main
from pekoe.launch.run_errors import RunFailedError, RunStoppedError
from pekoe.launch.run_jobs import RunJob
from pekoe.launch.submit import submit
from pekoe.pipeline.run_directory import RunDirectory

END_SECONDS = 120.0
RESULT = "import sys; from pekoe.launch.run_jobs import RunJob; print(RunJob.of(sys.argv[1]).result(timeout=100))"


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, sums: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "config.yaml"
    path.write_text(
        f"experiment_name: e\ntrial_name: t\nallocation: hf:d1|fsdp:d1\ntotal_train_steps: 2\n"
        f"cluster: {{fileroot: {tmp_path / 'runs'}, device: cpu, threads_per_rank: 1, site: laptop}}\n"
        f"train_dataset: {{type: jsonl, path: {sums}, batch_size: 4}}\nrecover: {{freq_steps: 1}}\n"
        f"actor: {{path: {tiny_model}, dtype: float32}}\ngconfig: {{max_new_tokens: 8, n_samples: 4}}\n"
        f"reward: {{name: gsm8k}}\nstats_logger: {{progress: lines}}\n"
    )
    return path


@pytest.mark.slow
def test_two_seeds_in_turn_and_their_results_from_another_process(config: Path) -> None:
    jobs = submit(config, seeds=[1, 2], array_parallelism=1)
    assert {job.entry.kind for job in jobs} == {"local"}
    assert jobs[1].run.run_json.exists()
    done = subprocess.run(
        [sys.executable, "-c", RESULT, str(jobs[1].run.path)], capture_output=True, text=True, timeout=END_SECONDS,
        check=False,
    )  # fmt: skip
    assert "code=0, outcome='done', steps=2" in done.stdout, done.stderr
    assert jobs[0].has_ended, "the second comes after the first"
    assert [job.result(timeout=60).run for job in jobs] == [str(job.run.path) for job in jobs]
    assert [job.state for job in jobs] == ["COMPLETED", "COMPLETED"]


@pytest.mark.slurm
def test_a_run_that_fails_is_an_error_and_one_that_is_cancelled_another(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, stopped = (
        submit(config, ["trial_name=failing", "reward.name=nowhere:nothing"])[0],
        submit(config, ["trial_name=stopped", "total_train_steps=5000", "total_train_epochs=500"])[0],
    )
    deadline = time.monotonic() + END_SECONDS
    while not list(stopped.run.checkpoints.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    with pytest.raises(RunFailedError, match="nowhere"):
        failing.result(timeout=END_SECONDS)
    assert not stopped.has_ended
    with pytest.raises(TimeoutError, match="has not ended after 0 s: RUNNING"):
        stopped.result(timeout=0.0)
    assert main(["cancel", str(stopped.run.path)]) == 0
    assert "stopped" in capsys.readouterr().out
    with pytest.raises(RunStoppedError, match="with a checkpoint"):
        RunJob.of(RunDirectory(stopped.run.path)).result(timeout=90)
    assert main(["status", str(stopped.run.path)]) == 0
    shown = capsys.readouterr().out
    assert f"process {stopped.job_id} (submit): FAILED" in shown
    assert "ended with code 75" in shown
