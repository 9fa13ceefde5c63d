"""Synchronous GRPO in one process, written as plainly as possible: what the system must equal at eta = 0.

No cache, no packing, no batch: a full forward for each sampled token, sequences trained one by one. It shares with the
system the definitions only: order of prompts, seeds, the uniform stream, the formulas of GRPO.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from digit_reward import digit_share
from transformers import AutoModelForCausalLM, AutoTokenizer

from pekoe.pipeline.records import group_number, sampling_seed


@dataclass
class Sampled:
    """One completion with its reward."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float


@dataclass
class ReferenceRun:
    """Completions by (group, sample) and the loss of each step."""

    completions: dict[tuple[int, int], Sampled] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def run_reference(
    model_path: Path, data_path: Path, *, seed: int, steps: int, batch: int, n_samples: int, max_new_tokens: int,
    temperature: float, lr: float,
) -> ReferenceRun:  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = [json.loads(line) for line in data_path.read_text().splitlines()]
    words = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64)).random_raw(len(rows))
    order = np.argsort(words, kind="stable")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=lr, eps=1e-8
    )
    found = ReferenceRun()
    for step in range(steps):
        groups = []
        for position in range(step * batch, (step + 1) * batch):
            group = group_number(0, position)
            prompt = tokenizer.encode(rows[int(order[position])]["question"])
            samples = []
            for sample in range(n_samples):
                drawn = _complete(
                    model, tokenizer, prompt, sampling_seed(seed, group, 0, sample), max_new_tokens, temperature
                )
                found.completions[group, sample] = drawn
                samples.append(drawn)
            groups.append(samples)
        found.losses.append(_train(model, optimizer, groups, temperature))
    found.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return found


def _complete(model, tokenizer, prompt, seed, max_new_tokens, temperature) -> Sampled:  # type: ignore[no-untyped-def]
    stream = np.random.Generator(np.random.Philox(key=seed))
    uniforms = stream.random(256, dtype=np.float32)
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < max_new_tokens and (not tokens or tokens[-1] != tokenizer.eos_token_id):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1].float()
        scores = torch.log_softmax(logits / temperature, dim=-1)
        cumulated = scores.exp().cumsum(-1)
        token = int(torch.searchsorted(cumulated, float(uniforms[len(tokens)]) * cumulated[-1], right=True))
        tokens.append(token)
        logprobs.append(float(scores[token]))
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Sampled(prompt, tokens, logprobs, digit_share("", text, prompt, tokens))


def _train(model, optimizer, groups: list[list[Sampled]], temperature: float) -> float:  # type: ignore[no-untyped-def]
    num_active = sum(len(sample.tokens) for group in groups for sample in group)
    optimizer.zero_grad()
    total = 0.0
    for group in groups:
        rewards = np.array([sample.reward for sample in group])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-5)
        for sample, advantage in zip(group, advantages, strict=True):
            ids = torch.tensor([sample.prompt + sample.tokens])
            scores = torch.log_softmax(model(ids).logits[0].float() / temperature, dim=-1)
            start = len(sample.prompt)
            chosen = scores[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
            weight = (chosen.detach() - torch.tensor(sample.logprobs)).exp()
            ratio = (chosen - chosen.detach()).exp()
            loss = -(float(advantage) * ratio * weight).sum() / num_active
            loss.backward()
            total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total
