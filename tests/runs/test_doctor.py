"""`pekoe doctor`: the state of real run directories, whole and damaged, and whether its next steps help."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import KilledRun
from run_command import base_overrides, environment
from test_death import heartbeats, start, wait_for_step

from pekoe.launch.allocation import place
from pekoe.launch.cli import main
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.doctor import Diagnosis, diagnose
from pekoe.pipeline.runs.finding import Finding, Severity
from pekoe.pipeline.train.checkpoint import Checkpoints
from pekoe.pipeline.trajectory.archive import Archive, archive_files
from pekoe.pipeline.trajectory.store import Store


def examine(path: Path, deep: bool = False, now: float | None = None) -> Diagnosis:
    return diagnose(RunDirectory(path), deep=deep, place=place, now=now)


def found(diagnosis: Diagnosis, area: str, text: str) -> Finding:
    """The one finding of an area that holds a text."""
    matching = [item for item in diagnosis.findings if item.area == area and re.search(text, item.text)]
    assert len(matching) == 1, diagnosis.text()
    return matching[0]


@pytest.fixture
def killed(killed_run: KilledRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed_run.killed, tmp_path / "killed"))


@pytest.fixture
def resumed(killed_run: KilledRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed_run.resumed, tmp_path / "resumed"))


def test_a_killed_run_is_told_with_its_next_step(killed: Path) -> None:
    diagnosis = examine(killed, deep=True)
    failed = found(diagnosis, "attempts", "attempt 0")
    assert failed.severity is Severity.PROBLEM
    assert "rank 1 (rollout, " in failed.text
    assert "killed by signal 9" in failed.text
    assert str(killed / "errors" / "attempt-0.json") in failed.text
    assert str(killed / "logs" / "0" / "rank-1.log") in failed.text
    assert failed.next_step.endswith(f"pekoe run --resume {killed}")
    assert found(diagnosis, "progress", r"step \d of at most 8: reward/mean ").severity is Severity.OK
    latest = Checkpoints(RunDirectory(killed), keep=2).latest(deep=True)
    assert latest is not None
    found(diagnosis, "checkpoints", rf"a resumption goes on from step {latest[0]} \({latest[1].name}\)")
    found(diagnosis, "ledger", rf"after the newest checkpoint .* again from step {latest[0]}:")
    assert diagnosis.problems == [failed]
    assert diagnosis.exit_code == 1


def test_a_finished_run_has_no_problem(resumed: Path) -> None:
    diagnosis = examine(resumed, deep=True)
    assert found(diagnosis, "attempts", "attempt 0 .*killed by signal 9").severity is Severity.NOTE
    assert found(diagnosis, "attempts", "attempt 1 .*finished").severity is Severity.OK
    assert not diagnosis.problems, diagnosis.text()
    assert diagnosis.exit_code == 0
    found(diagnosis, "ledger", "^8 steps recorded")
    found(diagnosis, "ledger", "^epoch 0: 32 consumed, 0 filtered, 0 skipped")
    found(diagnosis, "exports", r"^step-8: [\d,]+ parameters")
    found(diagnosis, "set aside", r"the run went on from (step|version) N")
    assert "nothing is wrong" in diagnosis.text()


def test_the_command_loads_neither_torch_nor_mpi_and_gives_its_exit_code(killed: Path, resumed: Path) -> None:
    program = (
        "import sys, pekoe.launch.cli as cli\n"
        "code = cli.main(['doctor', *sys.argv[1:]])\n"
        "heavy = {'torch', 'mpi4py', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    for path, code in ((killed, 1), (resumed, 0)):
        done = subprocess.run(
            [sys.executable, "-c", program, str(path), "--deep", "--json"],
            env=environment(), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert done.stderr == ""
        said = json.loads(done.stdout)
        assert said["exit_code"] == code
        assert {item["area"] for item in said["findings"]} >= {"attempts", "checkpoints", "ledger", "shards", "disk"}


def test_what_is_no_run_is_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 78
    assert "not a run directory" in capsys.readouterr().err


@pytest.mark.timeout(200)
def test_a_run_under_way_is_running_and_then_stopped(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "alive"), "total_train_epochs": 100, "total_train_steps": 900,
    }  # fmt: skip
    path = tmp_path / "test" / "alive"
    process = start(tmp_path, overrides)
    wait_for_step(path, 3, process)
    diagnosis = examine(path)
    found(diagnosis, "attempts", "attempt 0 .*still running")
    found(diagnosis, "ranks", "^2 of 2 run: rank 0 in phase ")
    assert not diagnosis.problems, diagnosis.text()
    process.terminate()
    assert process.wait(timeout=60) == 75
    diagnosis = examine(path)
    stopped = found(diagnosis, "attempts", "attempt 0 .*stopped by SIGTERM, in order")
    assert stopped.next_step == f"pekoe run --resume {path}"
    assert diagnosis.exit_code == 0, diagnosis.text()
    note = path / "logs" / "0" / "end.json"
    assert json.loads(note.read_text())["signal"] == signal.SIGTERM
    note.unlink()
    found(examine(path), "attempts", "attempt 0 .*stopped by SIGTERM, in order")
    note.write_text(json.dumps({"code": 75, "signal": None, "time": 0.0}))
    found(examine(path), "attempts", "attempt 0 .*stopped by the end of the job's time, in order")


def forget_heartbeats(run_path: Path) -> None:
    for path in (run_path / "heartbeats").glob("node-*.json"):
        path.unlink()


def test_a_rank_that_is_silent_while_it_runs_is_a_problem(killed: Path) -> None:
    _, item = heartbeats(killed).popitem()
    forget_heartbeats(killed)
    (killed / "errors" / "attempt-0.json").unlink()
    now = time.time()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "pekoe"]) as process:
        for rank, age in ((0, 1.0), (1, 300.0)):
            host = "another-host" if rank == 0 else os.uname().nodename
            beat = {**item, "rank": rank, "time": now - age, "host": host, "pid": process.pid, "phase": "rollout: idle"}
            (killed / "heartbeats" / f"rank-{rank}.json").write_text(json.dumps(beat))
        silent = examine(killed, now=now)
        process.kill()
    found(silent, "attempts", "still running")
    finding = found(silent, "ranks", r"^silent: rank 1 \(.*\) for 300 s")
    assert finding.severity is Severity.PROBLEM
    assert f"pekoe status {killed} --stacks" in finding.next_step
    found(silent, "ranks", "^2 of 2 run: rank 0 in phase 'rollout: idle'")
    gone = examine(killed, now=now)
    assert found(gone, "ranks", "^gone while others run: rank 1 .*'rollout: idle'").severity is Severity.PROBLEM
    found(examine(killed, now=now + 100), "attempts", "died without a word")


def test_threads_that_use_up_their_limits_are_told(killed: Path) -> None:
    (killed / "errors" / "attempt-0.json").unlink()
    now = time.time()
    _, item = heartbeats(killed).popitem()
    forget_heartbeats(killed)
    for rank, seconds in ((0, 1000.0), (1, 1900.0)):
        wait = {"who": "controller", "phase": "waiting for the batch", "seconds": seconds, "limit": 1800.0, "on": [1]}
        idle = {"who": "learner", "phase": "idle", "seconds": 9000.0}
        beat = {**item, "rank": rank, "time": now - 1, "host": "another-host", "phase": "working"}
        beat |= {"threads": [wait, idle]}
        (killed / "heartbeats" / f"rank-{rank}.json").write_text(json.dumps(beat))
    diagnosis = examine(killed, now=now)
    half = found(
        diagnosis, "ranks", "over half of the limit: rank 0 .* controller: waiting for the batch, since 1001 s"
    )
    assert half.severity is Severity.NOTE
    over = found(
        diagnosis, "ranks", "over the limit: rank 1 .* controller: waiting for the batch, since 1901 s of 1800"
    )
    assert over.severity is Severity.PROBLEM
    assert "learner" not in diagnosis.text()


def test_an_attempt_that_vanished_died_without_a_word(killed: Path) -> None:
    (killed / "errors" / "attempt-0.json").unlink()
    died = found(examine(killed), "attempts", "attempt 0 .*died without a word: no error record")
    assert died.severity is Severity.PROBLEM
    assert f"pekoe run --resume {killed}" in died.next_step


def test_next_steps_follow_the_error(killed: Path) -> None:
    path = killed / "errors" / "attempt-0.json"
    record = json.loads(path.read_text())
    for error, step in (
        ("DiskFull: paused: disk is full: rank 1", f"free space (df -h {killed}; du -sh {killed}/*), then pekoe run"),
        ("NoProgress: waited 1800 s (cluster.progress_seconds)", f"--resume {killed} cluster.progress_seconds=3600"),
        ("disagree: 0.2 > rollout.logprob_gap_limit 0.1", "engine and trainer compute differently"),
        ("ValueError: something else", "read the record and the log"),
    ):
        path.write_text(json.dumps({**record, "error": error, "stacks": {"3": "…"}}))
        finding = found(examine(killed), "attempts", "failed")
        assert step in finding.next_step
        assert "with the stacks of rank 3" in finding.text


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_empty(path: Path) -> None:
    os.truncate(path, 0)


def damage_garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


DAMAGES: tuple[Callable[[Path], None], ...] = (damage_truncate, damage_empty, damage_garbage, Path.unlink)


def told(name: str, damage: Callable[[Path], None], consumed: set[str], num_recorded: int) -> tuple[str, ...] | None:
    """What the findings must say of a damaged file, any of it; None where nobody can know."""
    folder, _, rest = name.partition("/")
    gone = damage is Path.unlink
    if ".part" in name:
        return None
    match folder:
        case "config.yaml" | "run.json" | "ledger" if gone and folder == "ledger":
            return (rest,) if int(re.sub(r"\D", "", rest)) < num_recorded else None
        case "config.yaml" | "run.json":
            return (folder,)
        case "ledger" | "heartbeats" if not (gone and folder == "heartbeats"):
            return (rest,)
        case "heartbeats":
            return ("no heartbeat of rank 0, 1",)
        case "checkpoints":
            return (f"{rest.partition('/')[0]} is damaged",)
        case "shards":
            return (name,) if not gone or name in consumed else None
        case "errors":
            return ("died without a word",) if gone else (rest,)
        case "exports" if rest.endswith((".safetensors", "/config.json")):
            return (f"exports/{rest.partition('/')[0]} is damaged",)
        case "set-aside" if rest.endswith(".reason.json"):
            return (rest.removesuffix(".reason.json"),)
        case "set-aside" if gone:
            return (rest,)
        case "metrics" if rest == "metrics.jsonl":
            return ("metrics/metrics.jsonl",)
    return None


def damaged_files(root: Path, state: str) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Each file but those of the code, damaged in each way, one at a time; of the resumed run what the killed one has
    not."""
    left_out = ("code",) if state == "killed" else ("code", "checkpoints", "shards", "ledger", "metrics", "heartbeats")
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.relative_to(root).parts[0] not in left_out:
            data = path.read_bytes()
            for damage in DAMAGES:
                damage(path)
                yield path, damage
                path.write_bytes(data)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("state", ["killed", "resumed"])
def test_any_single_damaged_file_is_named_and_nothing_crashes(state: str, request: pytest.FixtureRequest) -> None:
    root: Path = request.getfixturevalue(state)
    run = RunDirectory(root)
    latest = Checkpoints(run, keep=2).latest()
    assert latest is not None
    records = [json.loads(path.read_text()) for path in sorted(run.ledger.glob("step-*.json"))]
    consumed = {entry[2] for record in records if record["step"] <= latest[0] for entry in record["consumed"]}
    count = 0
    for path, damage in damaged_files(root, state):
        name = path.relative_to(root).as_posix()
        diagnosis = examine(root, deep=damage is damage_garbage)
        assert diagnosis.exit_code in (0, 1)
        assert "cannot be examined" not in diagnosis.text(), (name, damage.__name__, diagnosis.text())
        wanted = told(name, damage, consumed, len(records))
        if wanted is None:
            continue
        count += 1
        findings = [f for f in diagnosis.findings if f.severity is not Severity.OK]
        assert any(word in f.text for f in findings for word in wanted), (name, damage.__name__, diagnosis.text())
    assert count > (60 if state == "killed" else 30)


def test_folders_in_the_place_of_files_and_unreadable_ones_are_answered(killed: Path) -> None:
    for name in ("config.yaml", "run.json", "metrics/metrics.jsonl", "ledger/step-00000001.json"):
        (killed / name).unlink()
        (killed / name).mkdir()
    for name in ("checkpoints", "shards", "errors", "heartbeats"):
        shutil.rmtree(killed / name)
        (killed / name).write_text("a file")
    diagnosis = examine(killed)
    assert diagnosis.exit_code == 1
    assert {finding.area for finding in diagnosis.problems} >= {"files", "attempts", "progress"}
    for name in ("checkpoints", "shards", "errors", "heartbeats"):
        assert found(diagnosis, "files", f"^{name} is not a folder").severity is Severity.PROBLEM
    assert found(diagnosis, "ledger", "step-00000001.json").next_step == ""


def next_command(finding: Finding, beginning: str) -> str:
    """The command in a next step."""
    match = re.search(rf"({re.escape(beginning)} .*)", finding.next_step)
    assert match, finding
    return match[1]


def obey(command: str, root: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], env={**environment(), "PATH": path}, timeout=150, text=True, cwd=root,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"


def test_a_lost_run_json_is_made_anew_as_told(killed: Path) -> None:
    (killed / "run.json").write_text("{")
    finding = found(examine(killed), "attempts", "run.json cannot be read")
    obey(next_command(finding, "echo"), killed)
    assert not [f for f in examine(killed).findings if "run.json" in f.text]
    assert len(json.loads((killed / "run.json").read_text())["attempts"]) == 1


def test_a_lost_config_comes_back_from_before_the_last_resumption(resumed: Path) -> None:
    damage_garbage(resumed / "config.yaml")
    finding = found(examine(resumed), "files", "config.yaml cannot be used")
    obey(next_command(finding, "cp").partition(" (as it was")[0], resumed)
    assert examine(resumed).exit_code == 0


@pytest.mark.timeout(200)
def test_a_gap_in_the_ledger_is_stepped_back_over_as_told(killed: Path) -> None:
    """The record of step 3 is lost, checkpoint 4 needs it, checkpoint 2 does not."""
    (killed / "ledger" / "step-00000003.json").unlink()
    finding = found(examine(killed), "ledger", "no record of step 3")
    assert finding.severity is Severity.PROBLEM
    obey(next_command(finding, "mv"), killed.parent)
    diagnosis = examine(killed, deep=True)
    found(diagnosis, "attempts", "attempt 1 .*finished")
    assert not diagnosis.problems, diagnosis.text()
    consumed = [
        entry[0]
        for path in sorted((killed / "ledger").glob("step-*.json"))
        for entry in json.loads(path.read_text())["consumed"]
    ]
    assert sorted(consumed) == list(range(32))


@pytest.mark.timeout(200)
def test_only_damaged_checkpoints_are_started_over_only_as_told(killed: Path) -> None:
    for marker in (killed / "checkpoints").glob("step-*/COMPLETE.json"):
        marker.unlink()
    finding = found(examine(killed), "checkpoints", "all checkpoints are damaged")
    obey(next_command(finding, "mv"), killed.parent)
    diagnosis = examine(killed)
    found(diagnosis, "progress", "step 8 of at most 8")
    found(diagnosis, "ledger", "^epoch 0: 32 consumed")


def test_a_group_that_ended_twice_is_a_problem(resumed: Path) -> None:
    first, second = (resumed / "ledger" / f"step-0000000{step}.json" for step in (2, 3))
    record, other = json.loads(first.read_text()), json.loads(second.read_text())
    record["consumed"][0] = other["consumed"][0]
    first.write_text(json.dumps(record))
    finding = found(examine(resumed), "ledger", "1 group ended twice: epoch 0 position ")
    assert finding.severity is Severity.PROBLEM
    assert "in steps 2 and 3" in finding.text


def test_unfinished_files_are_noted(killed: Path) -> None:
    for path in [*killed.glob("shards/*/*.part"), *killed.glob("checkpoints/*.part")]:
        # the kill itself may have left some
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (killed / "checkpoints" / "step-60.attempt-0.part").mkdir()
    (killed / "shards" / "0-rank-1" / "000099.h5.1.part").write_text("half")
    note = found(examine(killed), "files", "2 unfinished files or folders")
    assert note.severity is Severity.NOTE
    assert "step-60.attempt-0.part" in note.text


def test_archives_are_examined_too(resumed: Path) -> None:
    config = resumed / "config.yaml"
    config.write_text(config.read_text().replace("keep_trajectories: shards", "keep_trajectories: archive"))
    run = RunDirectory(resumed)
    archive = Archive(run, target_bytes=1)
    archive.add(Store(run).paths())
    assert archive.close(60)
    diagnosis = examine(resumed, deep=True)
    assert not diagnosis.problems, diagnosis.text()
    found(diagnosis, "shards", r"^128 kept in \d archives?$")
    path = archive_files(run)[0]
    damage_truncate(path)
    damaged = found(examine(resumed), "shards", f"^archive/{path.name} is damaged: ")
    assert damaged.severity is Severity.PROBLEM
