"""The `pekoe` command: light to import, exit codes, sentences that tell the next step."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pekoe.launch.cli import main
from pekoe.pipeline.config.load import from_yaml_text


def test_help_and_import_load_nothing_heavy() -> None:
    program = (
        "import sys, pekoe.launch.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'mpi4py', 'transformers', 'numpy', 'h5py', 'vllm', 'submitit'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    for command in ("run", "config", "status", "shards", "export", "report"):
        assert command in result.stdout


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"experiment_name: e\nallocation: hf:d1+fsdp:d1\ncluster: {{fileroot: {tmp_path / 'runs'}}}\n")
    return path


def test_wrong_configuration_is_78_and_starts_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(config), "actor.pth=x"]) == 78
    assert "did you mean actor.path" in capsys.readouterr().err
    assert main(["run", str(config), "actor.path=/nowhere/model"]) == 78
    assert "/nowhere/model" in capsys.readouterr().err
    assert main(["run", str(config), "allocation=hf:d1+fsdp:x1"]) == 78
    assert "position" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "none.yaml")]) == 78
    assert "none.yaml" in capsys.readouterr().err
    assert main(["run"]) == 78
    assert "--resume" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_resume_of_nothing_is_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--resume", str(tmp_path)]) == 78
    assert "give the run directory" in capsys.readouterr().err


def test_overrides_after_resume_are_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run.json", "config.yaml"):
        (tmp_path / name).write_text("{}")
    assert main(["run", "--resume", str(tmp_path), "seed=3"]) == 78
    assert "seed: cannot change" in capsys.readouterr().err


def test_config_show_prints_what_loads_again(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(config), "seed=17"]) == 0
    shown = capsys.readouterr().out
    assert from_yaml_text(shown).seed == 17
    assert "order of data" in shown


def test_config_check_lists_what_is_wrong(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(config), "gconfig.temperature=0"]) == 78
    assert "gconfig.temperature" in capsys.readouterr().err


def test_config_import_prints_ours_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "areal.yaml"
    path.write_text("experiment_name: theirs\nrollout: {max_head_offpolicyness: 4}\nno_such_key: 1\n")
    assert main(["config", "import", str(path)]) == 0
    captured = capsys.readouterr()
    assert from_yaml_text(captured.out).rollout.max_head_offpolicyness == 4
    assert "no_such_key" in captured.err


def test_status_of_nothing_is_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 78
    assert "not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["report"], ["shards", "ls"], ["shards", "verify"]])
def test_what_is_no_run_is_78(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, str(tmp_path)]) == 78
    assert capsys.readouterr().err.startswith(f"pekoe: {tmp_path}: not a run directory")
    assert not list(tmp_path.iterdir())


def test_version_and_help_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"pekoe \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
    assert main([]) == 2
    assert "start a run, or continue one with --resume" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "report", "export"])
def test_positional_arguments_are_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert re.search(r"RUN +run directory", capsys.readouterr().out)
