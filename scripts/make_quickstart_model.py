"""Makes the quickstart's model: a tiny Qwen3 that has learned addition from bad demonstrations.

A solution adds two numbers column by column, units first, and then gives the answer: 47+85 is `12 13 #### 132`.
Most of the demonstrations forget every carry (`12 12 #### 22`), so the model knows both ways and prefers the wrong one:
its accuracy is about the share of problems without a carry. Only a reward can tell which way is right; that is left to
the quickstart's GRPO run.

Writes into OUT: the model and tokenizer in Hugging Face format, `train.jsonl` (the demonstrations use its problems too)
and `valid.jsonl` (problems that neither the demonstrations nor the run ever show), each row
{"question": "47+85", "answer": "132"}. Deterministic for a seed. Takes about half a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MARK = "####"
"""What stands before the answer, as in GSM8K; one token."""
VOCABULARY = ("<pad>", "<eos>", "<unk>", MARK, *"0123456789+-=*/.,? ")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
FORGETFUL_SHARE = 0.7
"""Share of demonstrations that forget every carry."""
NUM_VALID = 256
MAX_NEW_TOKENS = 12
"""The longest solution: `18 19 #### 198` and the end token."""
NUM_STEPS = 400
BATCH = 128
PEAK_LR = 3e-3
ACCURACY_BAND = (0.05, 0.6)
"""Where greedy accuracy must lie for the quickstart to have something to show."""

Problem = tuple[int, int]


def solution(problem: Problem, forgets_carries: bool) -> list[str]:
    """Tokens of a worked solution: the sum of the units, the sum of the tens (with the carry), the mark, the answer."""
    a, b = problem
    units, tens = a % 10 + b % 10, a // 10 + b // 10
    if forgets_carries:
        answer = tens % 10 * 10 + units % 10
    else:
        tens += units // 10
        answer = a + b
    return [*f"{units} {tens} ", MARK, *f" {answer}"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one for the mark."""
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(f"{MARK}|."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.2 M parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    messages = [{"role": "user", "content": f"{problem[0]}+{problem[1]}"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])


def demonstration_batch(
    prompts: dict[Problem, list[int]],
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] and labels [B, T] (-100 on prompt and padding); the labels are token aligned."""
    rows = []
    for problem in rng.choices(problems, k=BATCH):
        tokens = [*solution(problem, rng.random() < FORGETFUL_SHARE), "<eos>"]
        rows.append((prompts[problem], [VOCABULARY.index(token) for token in tokens]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((BATCH, width), int(tokenizer.pad_token_id))
    labels = torch.full((BATCH, width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], seed: int
) -> None:
    """Supervised training on the demonstrations: AdamW, short warm-up, cosine to nearly zero."""
    rng = random.Random(seed)
    prompts = {problem: prompt_ids(tokenizer, problem) for problem in problems}
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.01)
    started = time.monotonic()
    for step in range(1, NUM_STEPS + 1):
        scale = min(1.0, step / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / NUM_STEPS)))
        for parameters in optimizer.param_groups:
            parameters["lr"] = PEAK_LR * scale
        tokens, labels = demonstration_batch(prompts, problems, tokenizer, rng)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"  step {step}/{NUM_STEPS}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def greedy_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> float:
    """Share of problems answered exactly; every prompt has the same length, so that no padding is needed."""
    tokens = torch.tensor([prompt_ids(tokenizer, problem) for problem in problems])
    start = tokens.shape[1]
    for _ in range(MAX_NEW_TOKENS):
        best = model(input_ids=tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], dim=1)
    texts = tokenizer.batch_decode(tokens[:, start:])
    answers = [text.split("<eos>")[0].rpartition(f"{MARK} ")[2] for text in texts]
    right = [answer == str(a + b) for answer, (a, b) in zip(answers, problems, strict=True)]
    return sum(right) / len(right)


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    lines = (json.dumps({"question": f"{a}+{b}", "answer": str(a + b)}) for a, b in problems)
    path.write_text("".join(f"{line}\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; its parents are made")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights, the demonstrations and the split")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if out.exists():
        print(f"{out} is there already; remove it to make it again")
        return
    torch.set_num_threads(1)
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(arguments.seed).shuffle(problems)
    valid, train = problems[:NUM_VALID], problems[NUM_VALID:]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, arguments.seed)
    print(f"Warm-starting {sum(p.numel() for p in model.parameters()):,} parameters, seed {arguments.seed}", flush=True)
    warm_start(model, tokenizer, train, arguments.seed)
    accuracy = greedy_accuracy(model.eval(), tokenizer, valid)
    low, high = ACCURACY_BAND
    if not low <= accuracy <= high:
        sys.exit(f"greedy accuracy {accuracy:.3f} is outside [{low}, {high}]: take another --seed")
    partial = out.with_name(f"{out.name}.making")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    write_problems(partial / "train.jsonl", train)
    write_problems(partial / "valid.jsonl", valid)
    partial.rename(out)
    print(f"Greedy accuracy on {NUM_VALID} held-out problems: {accuracy:.3f}. Written to {out}")


if __name__ == "__main__":
    main()
