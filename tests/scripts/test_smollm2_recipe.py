"""SmolLM2-135M-Instruct on GSM8K by the recipe: real weights, tokenizer, chat template and questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GSM8K = Path(os.environ.get("PEKOE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))
STEPS = 3


def digit_share(
    prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """A user's reward with a signal at once; right answers are too rare in a few short completions of a small model."""
    assert data["answer"]
    return sum(character.isdigit() for character in completions) / max(len(completions), 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (GSM8K / "train.jsonl").is_file(), reason="GSM8K is not here; name its folder in PEKOE_GSM8K")
def test_recipe_trains_real_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = tmp_path / "smollm2"
    subprocess.run([sys.executable, "scripts/make_smollm2_model.py", str(model)], cwd=ROOT, check=True, timeout=300)
    command = [
        sys.executable, "-m", "pekoe.launch.cli", "run", "configs/smollm2_gsm8k.yaml", f"actor.path={model}",
        f"train_dataset.path={GSM8K}", f"cluster.fileroot={tmp_path}", f"total_train_steps={STEPS}",
        "reward.name=test_smollm2_recipe:digit_share", "stats_logger.progress=lines",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=850)

    run = tmp_path / "smollm2-gsm8k" / "first"
    rows = [json.loads(line) for line in (run / "metrics" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/grad_norm" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["train/grad_norm"] > 0 and row["reward/mean"] > 0 for row in steps)
    gaps = [row["weights/logprob_gap_max"] for row in rows if "weights/logprob_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-2
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run / "exports" / f"step-{STEPS}"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert before[name].shape == after[name].shape
    assert not before[name].equal(after[name])
