"""Attempts of a run: a fresh directory, refusal of one that is in use, resuming with the keys that may change."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pekoe.launch.attempts import (
    RunDirectoryError,
    begin_fresh,
    begin_resumed,
    check_overrides,
    check_teacher,
    first_directory,
    run_directory,
)
from pekoe.launch.heartbeat_files import write_heartbeat
from pekoe.pipeline.config.companions import TeacherConfig
from pekoe.pipeline.config.load import load
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.run_directory import RunDirectory


def config_in(folder: Path) -> RunConfig:
    config = RunConfig(experiment_name="e", trial_name="t")
    config.cluster.fileroot = str(folder)
    return config


def test_fresh_attempt_writes_config_code_and_count(tmp_path: Path) -> None:
    attempt = begin_fresh(config_in(tmp_path), "mpiexec", ["seed=1"])
    run = attempt.run
    assert (run.path, attempt.number) == (tmp_path / "e" / "t", 0)
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert load(run.config).experiment_name == "e"
    assert (run.code / "pekoe" / "launch" / "world.py").exists()
    record = json.loads(run.run_json.read_text())
    assert len(record["id"]) == 32
    assert [one["number"] for one in record["attempts"]] == [0]
    assert record["attempts"][0]["overrides"] == ["seed=1"]


@pytest.mark.parametrize("folder", ["checkpoints", "metrics", "shards", "ledger"])
def test_a_run_that_got_somewhere_is_not_overwritten(tmp_path: Path, folder: str) -> None:
    run = begin_fresh(config_in(tmp_path), "mpiexec").run
    (run.path / folder / "something").write_text("x")
    before = run.run_json.read_text()
    with pytest.raises(RunDirectoryError, match=f"{folder}.*pekoe run --resume {run.path}"):
        begin_fresh(config_in(tmp_path), "mpiexec")
    assert run.run_json.read_text() == before


def test_a_run_that_failed_at_its_start_may_be_started_again(tmp_path: Path) -> None:
    run = begin_fresh(config_in(tmp_path), "mpiexec").run
    (run.errors / "attempt-0.json").write_text("{}")
    (run.code / "pekoe" / "launch" / "world.py").write_text("old code")
    again = begin_fresh(config_in(tmp_path), "mpiexec")
    assert again.number == 1
    assert (run.code / "pekoe" / "launch" / "world.py").read_text() != "old code"
    assert (run.errors / "attempt-0.json").exists()


def test_resumed_attempt_keeps_the_code_and_counts_on(tmp_path: Path) -> None:
    run = begin_fresh(config_in(tmp_path), "mpiexec").run
    (run.code / "pekoe" / "launch" / "world.py").write_text("the code of the first attempt")
    (run.checkpoints / "step-1").mkdir()
    config = load(run.config, ["total_train_steps=9"])
    attempt = begin_resumed(run, config, "srun", ["total_train_steps=9"])
    assert attempt.number == 1
    assert (run.code / "pekoe" / "launch" / "world.py").read_text() == "the code of the first attempt"
    assert load(run.config).total_train_steps == 9
    assert load(run.path / "config-before-1.yaml").total_train_steps is None
    assert run_directory(config).path == run.path


def test_what_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"run.json and config.yaml missing"):
        begin_resumed(RunDirectory(tmp_path), config_in(tmp_path), "mpiexec")


@pytest.mark.parametrize("key", ["seed", "train_dataset.path", "actor.path", "gconfig.temperature", "trial_name"])
def test_keys_that_made_the_data_are_fixed(key: str) -> None:
    with pytest.raises(RunDirectoryError, match=f"{key}.*cannot change when a run is resumed"):
        check_overrides(["total_train_steps=5", f"{key}=1"])
    check_overrides(["total_train_steps=5", "actor.optimizer.lr=1e-5", "gconfig.top_p=0.9"])


@pytest.mark.parametrize(
    ("place", "overrides", "refused"),
    [
        ("engine", ["teacher.path=other"], "teacher.path: "),
        ("engine", ["teacher.place=trainer", "teacher.dtype=float32"], "teacher.dtype, teacher.place: "),
        ("engine", ["teacher=null"], "teacher.path, teacher.dtype, teacher.place: "),
        ("engine", ["teacher.rl_loss_weight=0.5", "teacher.path=t"], None),
        ("trainer", ["teacher.place=engine"], "teacher.place: "),
        ("trainer", ["teacher.path=other", "teacher.dtype=float32"], None),
    ],
)
def test_a_teacher_whose_log_probs_are_in_the_shards_is_fixed(
    tmp_path: Path, place: str, overrides: list[str], refused: str | None
) -> None:
    config = config_in(tmp_path)
    config.teacher = TeacherConfig(path="t", place=place)
    run = begin_fresh(config, "mpiexec").run
    changed = load(run.config, overrides)
    if refused is None:
        check_teacher(run, changed, overrides)
        return
    with pytest.raises(RunDirectoryError, match=f"^{refused}cannot change when a run is resumed.*another trial_name"):
        begin_resumed(run, changed, "mpiexec", overrides)
    assert len(json.loads(run.run_json.read_text())["attempts"]) == 1


def beat(pid: int, host: str, phase: str = "training") -> Heartbeat:
    return Heartbeat(0, "trainer", host, pid, 1, phase, 0.0, 3)


def test_a_run_that_still_lives_is_not_resumed(tmp_path: Path) -> None:
    run = begin_fresh(config_in(tmp_path), "mpiexec").run
    config = load(run.config)
    alive = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "pekoe"])
    try:
        deadline = time.monotonic() + 10
        while b"pekoe" not in Path(f"/proc/{alive.pid}/cmdline").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        write_heartbeat(run, 0, beat(alive.pid, socket.gethostname()))
        with pytest.raises(RunDirectoryError, match=f"attempt 0 still runs: rank 0 .*pid {alive.pid}"):
            begin_resumed(run, config, "mpiexec")
    finally:
        alive.kill()
        alive.wait()
    write_heartbeat(run, 0, beat(alive.pid, "another-host"))
    with pytest.raises(RunDirectoryError, match="another-host"):
        begin_resumed(run, config, "mpiexec")
    write_heartbeat(run, 0, beat(alive.pid, "another-host", "ended"))
    assert begin_resumed(run, config, "mpiexec").number == 1


def test_a_run_whose_ranks_are_gone_is_resumed_at_once(tmp_path: Path) -> None:
    run = begin_fresh(config_in(tmp_path), "mpiexec").run
    gone = subprocess.Popen([sys.executable, "-c", "", "pekoe"])
    gone.wait()
    write_heartbeat(run, 0, beat(gone.pid, socket.gethostname()))
    assert begin_resumed(run, load(run.config), "mpiexec").number == 1


def test_the_directory_of_the_first_start_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    monkeypatch.chdir(first)
    run = begin_fresh(config_in(tmp_path), "mpiexec").run
    monkeypatch.chdir(other)
    begin_resumed(run, load(run.config), "mpiexec")
    assert first_directory(run) == str(first)
    first.rmdir()
    assert first_directory(run) is None
    assert first_directory(RunDirectory(other)) is None
