"""Short asynchronous runs on completions of prescribed, long-tailed lengths: the same work in every run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
SAMPLES = 4


@dataclass(frozen=True)
class Work:
    """What the runs of one benchmark have in common."""

    folder: Path
    model: Path
    data: Path
    lengths: list[int]
    """Of the completions of example i."""
    steps: int
    batch: int
    experiment: str
    engine: str = "hf"
    max_slots: int = 128
    timeout_seconds: float = 900.0


def long_tailed(count: int, longest: int, middle: float = 20.0) -> list[int]:
    """Lognormal lengths around a median, cut at `longest`: most are short, a few are ten times the median."""
    rng = np.random.Generator(np.random.Philox(7))
    return [int(length) for length in np.clip(rng.lognormal(np.log(middle), 1.1, count), 4, longest)]


def run_once(work: Work, name: str, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One run; gives the metrics of its steps."""
    settings = [
        f"experiment_name={work.experiment} trial_name={name} allocation={work.engine}:d1+fsdp:d1",
        f"total_train_steps={work.steps} cluster.fileroot={work.folder} cluster.device=cpu cluster.threads_per_rank=1",
        f"train_dataset.type=jsonl train_dataset.path={work.data} train_dataset.batch_size={work.batch}",
        f"gconfig.n_samples={SAMPLES} gconfig.max_new_tokens={max(work.lengths)}",
        "workflow.name=long_tail_workflow:LongTailWorkflow reward.name=gsm8k",
        f"actor.path={work.model} actor.dtype=float32 actor.mb_spec.max_tokens_per_mb=2048",
        f"rollout.max_slots={work.max_slots}",
        "actor.optimizer.lr=1e-4 saver.at_end=false stats_logger.progress=off stats_logger.tensorboard=false",
    ]
    config = work.folder / f"{name}.yaml"
    config.write_text(f"workflow:\n  args: {{lengths: {json.dumps(work.lengths)}}}\n")
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(
        [sys.executable, "-m", "pekoe.launch.cli", "run", str(config), *" ".join(settings).split(), *overrides],
        check=True, env=environment, timeout=work.timeout_seconds, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    metrics = work.folder / work.experiment / name / "metrics" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    assert len(steps) == work.steps, f"{len(steps)} of {work.steps} steps"
    return steps


def total(steps: Sequence[dict[str, Any]], figure: str) -> float:
    return float(sum(step[figure] for step in steps))
