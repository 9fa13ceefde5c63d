"""Showing the tree, the documentation of its keys, and what a run keeps: effective configuration and code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pekoe.pipeline.config.show as show_module
from pekoe.pipeline.config.load import from_yaml_text, load
from pekoe.pipeline.config.schema import all_keys
from pekoe.pipeline.config.show import key_table, refresh_docs, show
from pekoe.pipeline.config.snapshot import snapshot_code, write_run_config
from pekoe.pipeline.run_directory import RunDirectory

ROOT = Path(show_module.__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "configuration.md"


def test_every_key_is_shown_with_its_meaning_in_one_column() -> None:
    config = from_yaml_text(
        "",
        [
            "valid_dataset.path=v",
            "eval_gconfig.top_k=3",
            "actor.adv_norm.eps=1e-6",
            "cluster.rollout_nodes.n_nodes=2",
            *(f"{section}={{}}" for section in ("critic", "ref", "teacher", "reward_model")),
        ],
    )
    lines = show(config).splitlines()
    keys = list(all_keys())
    assert len(lines) == len(keys)
    for line, key in zip(lines, keys, strict=True):
        assert line.strip().startswith(key.name.rpartition(".")[2] + ":")
        assert line.endswith(f"  # {key.meaning}")
    columns = [len(line) - len(key.meaning) for line, key in zip(lines, keys, strict=True)]
    assert max(columns.count(column) for column in set(columns)) > 0.9 * len(lines)
    assert any(line.startswith("    eps: 1e-06 ") for line in lines)


def test_a_null_section_is_one_line() -> None:
    lines = [line.split("#")[0].strip() for line in show(from_yaml_text("")).splitlines()]
    assert "valid_dataset: null" in lines
    assert "adv_norm: null" in lines


def test_the_documented_keys_are_the_keys() -> None:
    assert key_table() in DOCS.read_text(encoding="utf-8"), (
        "docs/configuration.md is out of date: python -m pekoe.pipeline.config.show docs/configuration.md"
    )


def test_refreshing_the_docs_changes_only_what_is_between_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"before\n{show_module.BEGIN}\nstale rows\n{show_module.END}\nafter\n")
    assert refresh_docs(file)
    text = file.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert key_table() in text
    assert "stale rows" not in text
    assert not refresh_docs(file)
    file.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        refresh_docs(file)


def test_the_examples_in_the_docs_load() -> None:
    text = DOCS.read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, re.S)
    assert examples
    for example in examples:
        from_yaml_text(example)
    commands = re.findall(r"^pekoe (?:run|config show) (\S+\.yaml)(.*)$", text, re.M)
    assert len(commands) >= 6
    for file, overrides in commands:
        load(ROOT / file, overrides.split())


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "experiment" / "trial")
    directory.create()
    return directory


def test_the_effective_configuration_is_written_whole(run: RunDirectory) -> None:
    config = from_yaml_text("algorithm: gspo", ["actor.eps_clip=0.01", "trial_name=x"])
    write_run_config(run, config)
    assert load(run.config) == config
    assert [path.name for path in run.path.iterdir() if path.is_file()] == ["config.yaml"]


def test_the_snapshot_holds_the_code_and_wins_over_the_install(run: RunDirectory) -> None:
    code = snapshot_code(run, ROOT)
    assert code == run.code
    native = [str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "native").glob("*.so")]
    for name in ("pipeline/records.py", "launch/allocation.py", "configs/algorithm/grpo.yaml", *native):
        assert (code / "pekoe" / name).read_bytes() == (ROOT / name).read_bytes()
    copied = [path for path in code.rglob("*") if path.is_file()]
    assert {path.suffix for path in copied} <= {".py", ".yaml", ".c", ".h", ".so"}
    assert sum(path.stat().st_size for path in copied) < 10_000_000
    assert {path.name for path in (code / "pekoe").iterdir()} <= {"configs", "kernels", "launch", "pipeline"}
    script = (
        "import pekoe.pipeline.config.load as load, pekoe.launch.allocation as allocation\n"
        "import pekoe.kernels.native.native_library as native\n"
        "print(load.__file__); print(allocation.__file__); print(load.PRESETS)\n"
        f"print(native.native_library()._name if {bool(native)} else native.__file__)\n"
        "load.from_yaml_text('algorithm: rloo')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=run.path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [line.startswith(str(code)) for line in done.stdout.splitlines()] == [True] * 4


def test_a_snapshot_stays_as_the_first_attempt_made_it(run: RunDirectory, tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    (root / "pipeline" / "__pycache__").mkdir(parents=True)
    (root / "pipeline" / "records.py").write_text("first = 1\n")
    (root / "pipeline" / "__pycache__" / "records.py").write_text("never\n")
    (root / "pipeline" / "data.bin").write_bytes(b"never")
    (root / "tests").mkdir()
    (root / "tests" / "test_x.py").write_text("never\n")
    snapshot_code(run, root)
    (root / "pipeline" / "records.py").write_text("second = 2\n")
    code = snapshot_code(run, root)
    files = [str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()]
    assert files == ["pekoe/pipeline/records.py"]
    assert (code / files[0]).read_text() == "first = 1\n"
    assert [path.name for path in code.iterdir()] == ["pekoe"]


def test_a_wrong_root_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"package_root: .* is not the folder with pipeline/"):
        snapshot_code(run, tmp_path)
    assert not run.code.exists()
