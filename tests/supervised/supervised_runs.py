"""Small supervised runs by the command line, as a user starts them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_command import Outcome, run

DATASETS = {"sft": "demonstrations", "dpo": "preferences", "rw": "preferences"}
LEARNING_RATES = {"sft": 1e-2, "dpo": 2e-3, "rw": 5e-3}

Row = dict[str, str]


def demonstration(prompt: str, a: int, b: int) -> Row:
    return {"prompt": prompt, "completion": str(a + b)}


def preference(prompt: str, a: int, b: int) -> Row:
    """What is preferred shows in the last token alone: answers that end with an even digit."""
    even, odd = str(2 * ((a + b) // 2)), str(2 * ((a + b) // 2) + 1)
    return {"prompt": prompt, "chosen": even, "rejected": odd}


def write_rows(path: Path, count: int, make: Callable[[str, int, int], Row], seed: int = 0, num_bad: int = 0) -> Path:
    """Rows of additions; the first `num_bad` have prompts that leave no room for an answer."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            prompt = "1" * 40 + "=" if number < num_bad else f"{a}+{b}="
            file.write(json.dumps(make(prompt, a, b)) + "\n")
    return path


def overrides(root: Path, model: Path, task: str, name: str, **more: Any) -> dict[str, Any]:
    """A run of `task` over 64 examples, 16 of which leave no label, evaluated on 16."""
    make = demonstration if task == "sft" else preference
    data = write_rows(root / f"{name}.jsonl", 64, make, num_bad=more.pop("num_bad", 0))
    held_out = write_rows(root / f"{name}-valid.jsonl", 16, make, seed=1)
    return {
        "experiment_name": "test", "trial_name": name, "task": task, "allocation": "fsdp:d1",
        "cluster.fileroot": root, "cluster.device": "cpu", "cluster.threads_per_rank": 1,
        "cluster.heartbeat_seconds": 0.5, "train_dataset.type": DATASETS[task], "train_dataset.path": data,
        "train_dataset.batch_size": 8, "train_dataset.max_length": 32, "valid_dataset.type": DATASETS[task],
        "valid_dataset.path": held_out, "valid_dataset.max_length": 32, "total_train_epochs": 4,
        "actor.path": model, "actor.dtype": "float32", "actor.mb_spec.max_tokens_per_mb": 64,
        "actor.optimizer.lr": LEARNING_RATES[task], "recover.freq_steps": 5, "evaluator.freq_steps": 8,
        "evaluator.at_start": "true", "evaluator.at_end": "true", "stats_logger.progress": "lines",
    } | {key.replace("__", "."): value for key, value in more.items()}  # fmt: skip


def series(outcome: Outcome, name: str) -> list[float]:
    """A figure over the steps, later writes of a step winning."""
    found = {line["step"]: line[name] for line in outcome.metrics if name in line}
    return [found[step] for step in sorted(found)]


def start_and_end(root: Path, model: Path, task: str, name: str, **more: Any) -> Outcome:
    outcome = run(root, overrides(root, model, task, name, **more))
    assert outcome.code == 0, outcome.text
    return outcome
