"""`kill -9` of the launcher: its ranks stop in order where they can, and end in any case; so does mpiexec."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from pekoe.launch.attempts import begin_fresh, begin_resumed
from pekoe.launch.launch_notes import processes_of
from pekoe.launch.supervisor import LAUNCH_DIRECTORY
from pekoe.pipeline.config.load import load
from pekoe.pipeline.config.run import RunConfig

sys.path.insert(0, str(Path(__file__).resolve().parent))
from worlds import StartedWorld

LIMIT = 40.0


def kill_launcher(world: StartedWorld) -> Path:
    """Kills it when both ranks are at work; gives the world's folder when nothing of the world lives any more."""
    rank = psutil.Process(world.wait_until_said(2)[0]["pid"])
    folder = Path(rank.environ()[LAUNCH_DIRECTORY])
    assert any("mpiexec" in process.name() for process in processes_of(folder))
    world.process.kill()
    world.process.wait()
    deadline = time.monotonic() + LIMIT
    while processes_of(folder):
        assert time.monotonic() < deadline, processes_of(folder)
        time.sleep(0.05)
    return folder


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_of_a_killed_launcher_stop_in_order(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "stop-all")
    folder = kill_launcher(world)
    wait_until_gone(folder)
    assert sorted(said["rank"] for said in world.said() if "stopped" in said) == [0, 1]
    assert not list(run.glob("errors/*"))
    output = run.with_suffix(".out")
    assert f"the launcher (pid {world.process.pid}) is gone" in output.read_text()
    deadline = time.monotonic() + LIMIT
    while f"pekoe run --resume {run}" not in output.read_text():
        assert time.monotonic() < deadline, "the guardian says the next step after it has removed the folder"
        time.sleep(0.02)


def test_deaf_ranks_of_a_killed_launcher_are_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "deaf")
    folder = kill_launcher(world)
    wait_until_gone(folder)
    record = json.loads((run / "errors" / "attempt-0.json").read_text())
    assert record["error"].startswith(f"the launcher (pid {world.process.pid}) was killed")


def test_a_guardian_ends_with_its_world(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert StartedWorld(run, "clean").finish().code == 0
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if "pekoe.launch.guardian" in line and str(run) in line]


def test_later_attempts_find_modules_of_the_first_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    (first / "module_of_a_user.py").write_text("WORD = 'found'\n")
    program = other / "program.py"
    program.write_text(
        "from pekoe.launch.supervisor import supervise\n"
        "def live(reports):\n"
        "    import json, pekoe.pipeline.records, module_of_a_user\n"
        "    print(json.dumps({'word': module_of_a_user.WORD, 'code': pekoe.pipeline.records.__file__}), flush=True)\n"
        "    reports.ended(0)\n"
        "    return 0\n"
        "supervise(live, 0)\n"
    )
    config = RunConfig(experiment_name="e", trial_name="t")
    config.cluster.fileroot = str(tmp_path)
    monkeypatch.chdir(first)
    run = begin_fresh(config, "mpiexec").run
    monkeypatch.chdir(other)
    begin_resumed(run, load(run.config), "mpiexec")
    ended = StartedWorld(run.path, "import", num_ranks=1, program=program).finish()
    assert ended.code == 0, ended.output
    assert ended.said == [{"word": "found", "code": str(run.code / "pekoe" / "pipeline" / "records.py")}]
