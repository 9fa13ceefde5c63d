"""Sampling for runs with an exact lag: the quickstart's problems, a plain batched decode, real trajectories.

Legend: B rows, P tokens of a prompt (the same for all), N new tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from pekoe.pipeline.records import Finish, Trajectory
from pekoe.pipeline.reward.gsm8k_reward import gsm8k_reward

NUM_VALID = 256


@dataclass(frozen=True)
class Problem:
    """A prompt and its answer."""

    prompt: tuple[int, ...]
    answer: str


class Task:
    """The problems of the quickstart's folder; every prompt has the same number of tokens."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.end = int(self.tokenizer.eos_token_id)
        self.train = self._read(folder / "train.jsonl")
        self.valid = self._read(folder / "valid.jsonl")[:NUM_VALID]

    def _read(self, path: Path) -> list[Problem]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        ids = self.tokenizer([self._text(row["question"]) for row in rows], add_special_tokens=False)["input_ids"]
        assert len({len(row) for row in ids}) == 1, "prompts differ in length"
        return [Problem(tuple(prompt), row["answer"]) for prompt, row in zip(ids, rows, strict=True)]

    def _text(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def reward(self, completion: Sequence[int], answer: str) -> float:
        text = self.tokenizer.decode(completion, skip_special_tokens=True)
        return gsm8k_reward("", text, (), (), answer=answer)


@torch.no_grad()
def decode(
    model: Any, prompts: Sequence[Sequence[int]], end: int, max_new_tokens: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs [B, N] at temperature 1 (greedy without a generator); what stands after an end token
    means nothing."""
    fresh = torch.tensor([list(prompt) for prompt in prompts])
    unended = torch.ones(len(fresh), dtype=torch.bool)
    tokens, logprobs, cache = [], [], None
    for _ in range(max_new_tokens):
        found = model(input_ids=fresh, past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        logp = found.logits[:, -1].float().log_softmax(-1)
        if generator is None:
            fresh = logp.argmax(-1, keepdim=True)
        else:
            fresh = torch.multinomial(logp.exp(), 1, generator=generator)
        tokens.append(fresh)
        logprobs.append(logp.gather(1, fresh))
        unended &= fresh[:, 0] != end
        if not unended.any():
            break
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def completions(tokens: Tensor, end: int) -> list[list[int]]:
    """Each row up to its end token, which is kept."""
    rows = tokens.tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def sample_group(
    model: Any, task: Task, problems: Sequence[Problem], num_samples: int, max_new_tokens: int, version: int,
    generator: torch.Generator,
) -> list[list[Trajectory]]:  # fmt: skip
    """[problem][sample]: completions with rewards, sampled by the weights of `version`."""
    rows = [problem for problem in problems for _ in range(num_samples)]
    tokens, logprobs = decode(model, [row.prompt for row in rows], task.end, max_new_tokens, generator)
    made = []
    for number, (problem, completion) in enumerate(zip(rows, completions(tokens, task.end), strict=True)):
        before, length = len(problem.prompt), len(completion)
        mask = np.zeros(before + length, dtype=np.uint8)
        mask[before:] = 1
        behaviour = np.zeros(before + length, dtype=np.float32)
        behaviour[before:] = logprobs[number, :length].numpy()
        trajectory = Trajectory(
            tokens=np.array([*problem.prompt, *completion], dtype=np.int32),
            loss_mask=mask,
            logprobs=behaviour,
            versions=np.where(mask == 1, version, -1).astype(np.int32),
            turns=np.where(mask == 1, 0, -1).astype(np.int32),
            prompt_length=before,
            reward=task.reward(completion, problem.answer),
            finish=Finish.STOP if completion[-1] == task.end else Finish.LENGTH,
            sample=number % num_samples,
        )
        made.append(trajectory)
    return [made[start : start + num_samples] for start in range(0, len(made), num_samples)]


def greedy_accuracy(model: Any, task: Task, max_new_tokens: int) -> float:
    """On the held-out problems."""
    tokens, _ = decode(model, [problem.prompt for problem in task.valid], task.end, max_new_tokens, None)
    answers = completions(tokens, task.end)
    return float(np.mean([task.reward(row, problem.answer) for row, problem in zip(answers, task.valid, strict=True)]))
