"""States of jobs as squeue and sacct tell them, and which of them are an end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pekoe.launch import slurm
from pekoe.launch.job_states import JobState, expand_job, parse_states, read_states
from pekoe.launch.run_errors import RunFailedError, RunStoppedError
from pekoe.launch.slurm import StateWatcher, error_in
from pekoe.launch.slurm_commands import SlurmError

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_slurm import FakeSlurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def test_ids_of_arrays_and_heterogeneous_jobs() -> None:
    assert expand_job("12") == ["12"]
    assert expand_job("12_3") == ["12_3"]
    assert expand_job("12_[0-2,5%2]") == ["12_0", "12_1", "12_2", "12_5"]
    assert expand_job("12+1") == ["12"]


def test_lines() -> None:
    lines = [
        "7|RUNNING|n[1-2]|None", "8_[0-1%1]|PENDING||Resources", "9|CANCELLED by 0|None assigned|",
        "10.batch|FAILED|n1|",
        "11+0|COMPLETED|n1|None", "11+1|RUNNING|n2|None", "13+0|RUNNING|n1|", "13+1|FAILED|n2|", "",
    ]  # fmt: skip
    assert parse_states(lines) == {
        "7": JobState("RUNNING", "n[1-2]", "None"),
        "8_0": JobState("PENDING", "", "Resources"),
        "8_1": JobState("PENDING", "", "Resources"),
        "9": JobState("CANCELLED"),
        "11": JobState("RUNNING", "n2", "None"),
        "13": JobState("RUNNING", "n1"),
    }


def test_accounts_tell_of_what_the_queue_has_forgotten(fake: FakeSlurm) -> None:
    fake.command("squeue", "echo '7|PENDING||Dependency'")
    fake.command("sacct", "echo '7|PREEMPTED|n1|None'; echo '8|TIMEOUT|n1|None'")
    states = read_states(["7", "8", "9"])
    assert [states[job].state for job in ("7", "8", "9")] == ["PENDING", "TIMEOUT", "GONE"]
    fake.command("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert read_states(["8"])["8"].state == "GONE"
    fake.command("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        read_states(["8"])


@pytest.mark.parametrize("state", ["SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "COMPLETING", "STOPPED"])
def test_what_is_not_the_end(fake: FakeSlurm, state: str) -> None:
    fake.command("squeue", f"echo '7|{state}|n1|None'")
    watcher = StateWatcher()
    assert watcher.get_state("7") == state
    assert not watcher.is_done("7", mode="force")


def test_a_state_in_passing_is_believed_only_when_it_stays(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(slurm.time, "monotonic", lambda: clock[0])
    watcher = StateWatcher()
    for state in ("PREEMPTED", "NODE_FAIL"):
        fake.command("squeue", f"echo '7|{state}|n1|None'")
        assert not watcher.is_done("7", mode="force")
        clock[0] += 60
        fake.command("squeue", "echo '7|PENDING||BeginTime'")
        assert not watcher.is_done("7", mode="force")
    fake.command("squeue", "echo '7|PREEMPTED|n1|None'")
    assert not watcher.is_done("7", mode="force")
    clock[0] += slurm.SETTLE_SECONDS
    assert watcher.is_done("7", mode="force")


def test_no_answer_is_no_end(fake: FakeSlurm) -> None:
    fake.command("squeue", "echo '7|RUNNING|n1|None'")
    watcher = StateWatcher()
    assert not watcher.is_done("7", mode="force")
    fake.command("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert not watcher.is_done("7", mode="force")
    assert watcher.get_state("7", mode="cache") == "RUNNING"


def test_errors_come_back_from_their_traces() -> None:
    failed = error_in("Traceback …\npekoe.launch.run_errors.RunFailedError: attempt 0 failed: x: y\nmore\n")
    assert isinstance(failed, RunFailedError)
    assert str(failed) == "attempt 0 failed: x: y\nmore"
    wrong = error_in("…\npekoe.launch.run_errors.RunFailedError: /run: the configuration is wrong: no such mpiexec\n")
    assert isinstance(wrong, RunFailedError)
    assert (failed.exit_code, wrong.exit_code) == (1, 78)
    assert isinstance(error_in("…\npekoe.launch.run_errors.RunStoppedError: stopped"), RunStoppedError)
    assert "before the run began" in str(error_in("Traceback …\nModuleNotFoundError: no yaml"))
