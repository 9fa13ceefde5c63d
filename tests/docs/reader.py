"""Someone who reads README and docs and types their commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from documented_commands import ROOT

CI_RUNS = (".venv/bin/ruff check", "mkdir -p build/typing", "pre-commit install", "./scripts/setup_venv.sh")
"""Beginnings of lines that are what `.ci/run` or git itself does with this very checkout."""
ALL_TESTS = "./scripts/test.sh"
"""Also what `.ci/run` does; with lanes behind it, it is typed here."""
LANE_FOLDERS = "tests/docs tests/slurm/test_documented_commands.py tests/vllm/test_vllm_documented_commands.py"
"""Tests of the lanes that the pages name."""
VLLM_STAMP = ROOT / os.environ.get("PEKOE_VENV_VLLM", ".venv-vllm") / "pekoe-setup"


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
        if line == ALL_TESTS:
            assert "scripts/test.sh\n" in (ROOT / ".ci" / "run").read_text()
            return
        text, environment = line, self.environment()
        if line.startswith("./scripts/test.sh"):
            environment["PYTEST_ADDOPTS"] = f"--collect-only {LANE_FOLDERS}"
            if not VLLM_STAMP.exists():
                # Only some lanes were asked for, without vLLM: making its environment is not what is under test here.
                text = line.replace("test.sh vllm", "test.sh core")
        elif line.startswith("./scripts/quickstart.sh"):
            text += " total_train_steps=1 valid_dataset.size=8 experiment_name=docs"
        elif "make_smollm2_model" in line or "smollm2_gsm8k" in line:
            return
        elif "pekoe run --resume" in line or ("pekoe " in line and "pekoe run" not in line):
            text = line.replace("runs/quickstart/", f"{self.home}/quickstart/").replace(
                " exported", f" {self.home}/out"
            )
            text = text.replace("areal.yaml", str(self.home / "areal.yaml"))
        elif "make_supervised_data" in line:
            assert (ROOT / "runs" / "models" / "quickstart").is_dir()
        elif "_quickstart.yaml" in line:
            self.num_runs += 1
            small = "total_train_steps=1 valid_dataset.size=4"
            text = f"{line} trial_name=docs-{self.num_runs} {small} cluster.fileroot={self.home}"
        elif match := re.search(r"configs/(sft|dpo|rw)\.yaml", line):
            text = f"{line} {self.smaller_supervised(match[1])}"
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
        trial += f" teacher.path={self.model}" if "teacher.path=" in line else ""
        trial += f" reward_model.path={self.home}/rw/judge/exports/step-1" if "reward_model.path=" in line else ""
        return (
            f"{trial} total_train_steps=1 train_dataset.batch_size=2 gconfig.n_samples=4 evaluator.freq_steps=null "
            f"actor.path={self.model} train_dataset.path={self.data} valid_dataset.path={self.data} "
            f"valid_dataset.size=4 cluster.fileroot={self.home} rollout.keep_trajectories=shards"
        )

    def smaller_supervised(self, task: str) -> str:
        row = {"prompt": "1+2=", "completion": "3", "chosen": "3", "rejected": "4"}
        data = self.home / "supervised.jsonl"
        data.write_text(f"{json.dumps(row)}\n" * 4)
        return (
            f"total_train_steps=1 train_dataset.batch_size=2 train_dataset.max_length=64 actor.path={self.model} "
            f"train_dataset.path={data} cluster.fileroot={self.home} cluster.device=cpu actor.dtype=float32 "
            "cluster.threads_per_rank=1"
        )
