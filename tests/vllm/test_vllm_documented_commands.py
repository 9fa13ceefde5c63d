"""Every command of README and docs that needs vLLM is run, with a small model in place of the documented one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from documented_commands import commands, needs_cluster, needs_vllm
from reader import Reader

pytestmark = pytest.mark.vllm

COMMANDS = [line for page, line in commands() if needs_vllm(line) and not needs_cluster(page, line)]


def test_there_are_some() -> None:
    assert len(COMMANDS) >= 2


@pytest.mark.timeout(180)
@pytest.mark.parametrize("line", COMMANDS)
def test_documented_command_runs(line: str, tmp_path: Path, sums: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=64, head_dim=32)
    Reader(tmp_path, model, sums).type(line)
