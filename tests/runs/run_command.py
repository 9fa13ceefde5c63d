"""Starts real runs by the command line, as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass
class Outcome:
    """A run that has ended."""

    code: int
    text: str
    run: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.run / "metrics" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics if "train/loss" in line]

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.run / "ledger").glob("step-*.json"))]

    def consumed(self) -> list[list[int]]:
        """Groups of each step, as recorded."""
        return [[entry[0] for entry in record["consumed"]] for record in self.ledger]


def environment() -> dict[str, str]:
    path = f"{HERE}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def base_overrides(root: Path, model: Path, data: Path, name: str) -> dict[str, Any]:
    return {
        "experiment_name": "test", "trial_name": name, "allocation": "hf:d1+fsdp:d1", "cluster.fileroot": root,
        "cluster.device": "cpu", "cluster.threads_per_rank": 1, "cluster.heartbeat_seconds": 0.5,
        "train_dataset.type": "jsonl", "train_dataset.path": data, "train_dataset.batch_size": 4,
        "gconfig.n_samples": 4, "gconfig.max_new_tokens": 8, "total_train_steps": 4,
        "rollout.max_head_offpolicyness": 2, "rollout.keep_trajectories": "shards",
        "reward.name": "digit_reward:digit_share",
        "actor.path": model, "actor.dtype": "float32", "actor.mb_spec.max_tokens_per_mb": 128,
        "actor.optimizer.lr": 1e-3, "stats_logger.progress": "lines",
    }  # fmt: skip


def command(config: Path, overrides: dict[str, Any]) -> list[str]:
    return [
        sys.executable, "-m", "pekoe.launch.cli", "run", str(config), *(f"{k}={v}" for k, v in overrides.items()),
    ]  # fmt: skip


def run(root: Path, overrides: dict[str, Any], *, timeout: float = 240, resume: bool = False) -> Outcome:
    """Runs to the end; the run directory is ROOT/test/NAME."""
    directory = root / "test" / str(overrides["trial_name"])
    config = root / "empty.yaml"
    config.write_text("{}\n")
    arguments = command(config, overrides)
    if resume:
        arguments = [sys.executable, "-m", "pekoe.launch.cli", "run", "--resume", str(directory)]
    done = subprocess.run(
        arguments, env=environment(), timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=root,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, directory)
