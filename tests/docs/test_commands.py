"""Every command in README and docs is run, in the order in which a reader meets it.

Runs are made small by overrides behind the documented ones; paths of examples point to what the test made. A command
that fits no rule below fails the test: a new command needs a way to be run. Run elsewhere: what needs a Slurm cluster
(tests/slurm/test_documented_commands.py), the lines of SmolLM2 (tests/scripts/test_smollm2_recipe.py, slow) and of
CI_RUNS; `scripts/test.sh` only collects here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from documented_commands import PAGES, ROOT, commands, needs_cluster

CI_RUNS = (".venv/bin/ruff check", "mkdir -p build/typing", "pre-commit install")
"""Beginnings of lines that are what `.ci/run` or git itself does with this very checkout."""


@dataclass
class Reader:
    """Someone who types the commands, in a folder of their own."""

    home: Path
    model: Path
    data: Path
    num_runs: int = 0

    def type(self, line: str) -> None:
        if line.startswith(CI_RUNS):
            assert (ROOT / ".ci" / "run").exists()
            return
        text, environment = line, self.environment()
        if line.startswith("./scripts/test.sh"):
            environment["PYTEST_ADDOPTS"] = "--collect-only"
        elif line.startswith("./scripts/quickstart.sh"):
            text += " total_train_steps=1 valid_dataset.size=8 experiment_name=docs"
        elif "make_smollm2_model" in line or "smollm2_gsm8k" in line:
            return
        elif "pekoe run --resume" in line or (line.startswith("pekoe ") and "pekoe run" not in line):
            text = line.replace("runs/quickstart/", f"{self.home}/quickstart/").replace(
                " exported", f" {self.home}/out"
            )
            text = text.replace("areal.yaml", str(self.home / "areal.yaml"))
        elif "pekoe run" in line:
            text = f"{line} {self.smaller(line)}"
        else:
            raise AssertionError(f"no way is known to run {line!r}")
        done = subprocess.run(
            ["bash", "-c", text], cwd=ROOT, env=environment, timeout=280, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}"

    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}

    def smaller(self, line: str) -> str:
        self.num_runs += 1
        trial = "" if "trial_name=" in line else f"trial_name=docs-{self.num_runs}"
        return (
            f"{trial} total_train_steps=1 train_dataset.batch_size=2 gconfig.n_samples=4 evaluator.freq_steps=null "
            f"actor.path={self.model} train_dataset.path={self.data} valid_dataset.path={self.data} "
            f"valid_dataset.size=4 cluster.fileroot={self.home} rollout.keep_trajectories=shards"
        )


AREAL = """
experiment_name: gsm8k-grpo
trial_name: trial0
seed: 1
total_train_epochs: 2
allocation_mode: sglang:d4p1t1+fsdp:d4p1t1
gconfig: {n_samples: 4, max_new_tokens: 1024, temperature: 1.0}
rollout: {max_concurrent_rollouts: 256, max_head_offpolicyness: 2}
actor: {path: Qwen/Qwen2.5-1.5B-Instruct, group_size: 4, eps_clip: 0.4}
train_dataset: {batch_size: 256, path: openai/gsm8k, type: rl}
"""


@pytest.mark.timeout(900)
def test_every_documented_command_runs(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    (tmp_path / "areal.yaml").write_text(AREAL)
    reader = Reader(tmp_path, tiny_model, sums)
    typed = [line for page, line in commands() if not needs_cluster(page, line)]
    assert len(typed) > 15
    began = time.monotonic()
    for line in typed:
        assert time.monotonic() - began < 800
        reader.type(line)


def test_documented_files_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    assert shutil.which("bash")
