"""Starts worlds of trainer ranks that are scripts, and writes the tiny models that they train."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

SECONDS = 240.0


def run_world(script: Path, folder: Path, size: int, scenarios: Sequence[str]) -> None:
    """All ranks of one world, in at most four minutes; what a rank said last is in the error."""
    command = [sys.executable, str(script), str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), *scenarios], stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    deadline, errors = time.monotonic() + SECONDS, []
    try:
        for process in ranks:
            errors.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[1])
    finally:
        for process in ranks:
            process.kill()
    assert all(process.returncode == 0 for process in ranks), "\n".join(errors)


def write_models(folder: Path) -> None:
    """`qwen3` and `qwen2` with large weights, so that log-probs are far from uniform."""
    torch.set_num_threads(1)
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    configs = {"qwen3": transformers.Qwen3Config(**sizes, head_dim=8), "qwen2": transformers.Qwen2Config(**sizes)}
    for kind, config in configs.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
