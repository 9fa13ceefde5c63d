"""One driver at a time: of many who start the same attempt one gets it; who is dead does not block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pekoe.launch import claim as claims
from pekoe.launch.claim import claim, is_mine, living_owner, newest_owner
from pekoe.pipeline.run_directory import RunDirectory

CLAIMANT = """
import sys, time
from pathlib import Path
from pekoe.launch.claim import claim
from pekoe.pipeline.run_directory import RunDirectory
job, restarts, at, stay = sys.argv[2:6]
time.sleep(max(0.0, float(at) - time.time()))
mine = claim(RunDirectory(Path(sys.argv[1])), job or None, int(restarts))
print("claimed" if mine else "turned away", flush=True)
if mine and float(stay):
    time.sleep(float(stay))
"""


def start(
    run: RunDirectory, job: str = "", restarts: int = 0, at: float = 0.0, stay: float = 0.0
) -> subprocess.Popen[str]:
    arguments = [str(run.path), job, str(restarts), str(at), str(stay)]
    return subprocess.Popen(
        [sys.executable, "-c", CLAIMANT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.mark.parametrize("old", ["", "ended", "dead"])
def test_of_many_at_the_same_time_one_gets_it(run: RunDirectory, old: str) -> None:
    if old:
        first = start(run, "7", 0, stay=30.0 if old == "dead" else 0.0)
        assert first.stdout is not None
        assert first.stdout.readline() == "claimed\n"
        first.kill()
        first.communicate(timeout=60)
    if old == "ended":
        (run.path / claims.FOLDER / "0.ended").touch()
    together = time.time() + 1.0
    many = [start(run, "7", 0 if old != "ended" else 1, together, stay=20.0) for _ in range(6)]
    time.sleep(max(0.0, together - time.time()))
    said = []
    for process in many:
        assert process.stdout is not None
        said.append(process.stdout.readline().strip())
    for process in many:
        process.kill()
    errors = [process.communicate(timeout=60)[1] for process in many]
    assert sorted(said) == ["claimed", *["turned away"] * 5]
    assert sum("is being run by job 7" in text and "nothing to do here" in text for text in errors) == 5
    assert all(process.returncode in (0, -9) for process in many)
    left = sorted(path.name for path in (run.path / claims.FOLDER).iterdir())
    assert not any("part" in name for name in left)
    assert sum(name.endswith(".json") for name in left) == (2 if old else 1)


def test_who_is_turned_away_has_touched_nothing(run: RunDirectory) -> None:
    mine = claim(run, "7")
    assert mine is not None
    assert is_mine(run)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    other = start(run, "7")
    out, errors = other.communicate(timeout=60)
    assert (out.strip(), other.returncode) == ("turned away", 0)
    assert f"pid {os.getpid()}" in errors
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def rewrite(run: RunDirectory, **fields: object) -> None:
    """The newest claim as of somebody else."""
    path = sorted((run.path / claims.FOLDER).glob("*.json"))[-1]
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_requeued_job_takes_its_run_back_and_its_old_copy_does_not(run: RunDirectory) -> None:
    assert claim(run, "7", 0)
    rewrite(run, host="n9")
    assert claim(run, "7", 0) is None
    assert claim(run, "7", 1)
    rewrite(run, host="n9")
    assert claim(run, "7", 0) is None, "the copy on a node that was cut off"
    owner = newest_owner(run)
    assert owner is not None
    assert owner.restarts == 1


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        ("echo '8|RUNNING|n9|None'", False),
        ("echo '8|SUSPENDED|n9|None'", False),
        ("echo '8|PENDING||Resources'", True),
        ("echo '8|CANCELLED|n9|None'", True),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
    ],
)
def test_slurm_says_whether_another_job_holds_it(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, taken: bool
) -> None:
    assert claim(run, "8", 0)
    rewrite(run, host="n9")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in (("squeue", answer), ("sacct", "exit 1")):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert (claim(run, "9", 0) is not None) is taken
    assert living_owner(run) is not None


def test_a_job_that_is_ending_gets_time_to_end(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claim(run, "8", 0)
    rewrite(run, host="n9")
    folder = tmp_path / "bin"
    folder.mkdir()
    asked = folder / "asked"
    script = f"if [ -e {asked} ]; then echo '8|COMPLETED|n9|'; else touch {asked}; echo '8|COMPLETING|n9|'; fi"
    (folder / "squeue").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert claim(run, "9", 0)


def test_outside_slurm_silence_tells_that_an_owner_elsewhere_is_dead(run: RunDirectory) -> None:
    assert claim(run, None)
    rewrite(run, host="elsewhere")
    assert claim(run, None) is None
    rewrite(run, claimed=time.time() - claims.REMOTE_SILENCE_SECONDS - 1)
    assert claim(run, None)


def test_a_released_claim_is_free_at_once(run: RunDirectory) -> None:
    mine = claim(run, "7", 0)
    assert mine is not None
    assert living_owner(run) is not None
    mine.release()
    assert living_owner(run) is None
    again = claim(run, "7", 0)
    assert again is not None
    assert again.path.name == "1.json"
