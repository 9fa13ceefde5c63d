"""TRL's GRPOTrainer on the same work: the baseline of `end_to_end.py`, in a process of its own.

    python scripts/bench/trl_side.py '{"model": …, "prompts": 8, "samples": 4, "tokens": 64, "steps": 3, …}'

Plain settings at their fastest on this machine: one optimiser update a batch, no reference model, no gradient
checkpointing (TRL's default recomputes activations, which only costs time where memory is no concern). Lengths are
natural, at most `tokens`. The last line is JSON: seconds and trained tokens of each step.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from typing import Any

import torch
from smollm2_material import questions, vowel_share


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """As the other side's, on TRL's conversations."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [vowel_share("", text, (), ()) for text in texts]


def train(settings: dict[str, Any], out: str) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []
    tokens: list[float] = []

    class StepClock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "completions/mean_length" in logs:
                tokens.append(float(logs["completions/mean_length"]) * batch)

    batch = settings["prompts"] * settings["samples"]

    arguments = GRPOConfig(
        output_dir=out, max_steps=settings["steps"], learning_rate=settings["lr"], lr_scheduler_type="constant",
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=batch // settings["micro_batch"],
        num_generations=settings["samples"], max_completion_length=settings["tokens"],
        temperature=1.0, beta=0.0, num_iterations=1,
        bf16=settings["dtype"] == "bfloat16", gradient_checkpointing=False, use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"}, seed=1,
    )  # fmt: skip
    rows = [
        {"prompt": [{"role": "user", "content": text}]} for text in questions(settings["prompts"] * settings["steps"])
    ]
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[StepClock()],
    )
    trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    assert len(seconds) == len(tokens) == settings["steps"]
    return {"seconds": seconds, "tokens": tokens, "threads": torch.get_num_threads()}


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    with tempfile.TemporaryDirectory() as out:
        print(json.dumps(train(settings, out)), flush=True)


if __name__ == "__main__":
    main()
