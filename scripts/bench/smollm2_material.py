"""What the benchmarks on SmolLM2-135M-Instruct share: the model, prompts, and a reward that costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "runs" / "models" / "smollm2"


def find_model(folder: Path = MODEL) -> Path:
    """The model's folder, made on first use (scripts/make_smollm2_model.py: 40 s, 0.5 GB)."""
    if not folder.exists():
        make = [sys.executable, str(ROOT / "scripts" / "make_smollm2_model.py"), str(folder)]
        subprocess.run(make, check=True, stdout=sys.stderr)
    return folder.resolve()


def context_limit(model: str | Path) -> int:
    """What the engines are built for: enough for the work, and no more than the model takes."""
    return min(512, int(json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]))


def questions(count: int) -> list[str]:
    """Different questions of nearly equal length."""
    return [f"What is {i + 2} + {3 * i + 1}? Explain step by step." for i in range(count)]


def write_questions(path: Path, count: int) -> Path:
    """The questions as JSON lines, with their answers."""
    rows = ({"question": text, "answer": str(4 * i + 3)} for i, text in enumerate(questions(count)))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def prompts(model: Path, count: int) -> list[list[int]]:
    """The questions as token ids, in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [[{"role": "user", "content": text}] for text in questions(count)]
    texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in messages]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def vowel_share(
    prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """A reward that differs between completions and costs nothing."""
    return sum(character in "aeiou" for character in completions) / max(len(completions), 1)
