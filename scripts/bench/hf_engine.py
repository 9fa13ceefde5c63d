"""The hf engine against transformers' own `generate`: sampled tokens a second, in the same run, one thread.

Equal lengths: every completion has the same length, so `generate` wastes nothing. Long tail: lognormal lengths;
`generate` computes every batch to its longest completion, the engine fills a row as soon as it is free. Prompts differ,
so none is shared. Both sides sample at temperature 1, and the engine also records log-probs. Before anything is timed,
greedy completions of both must be equal. Rounds alternate between the sides; a side's figure is its best round
(the one that other work on the machine disturbed least).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from bench_result import report
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from pekoe.pipeline.rollout.engine import GenerationRequest, SamplingParameters
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine

SLOTS, PROMPT, VOCABULARY = 32, 24, 512
CONTEXT = 512


def small_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        eos_token_id=None,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def prompts_of(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, VOCABULARY, (count, PROMPT)))


def run_engine(
    engine: HfEngine, prompts: torch.Tensor, lengths: Sequence[int], greedy: bool = False
) -> list[list[int]]:
    requests = [
        GenerationRequest(tuple(prompt), SamplingParameters(max_new_tokens=length, greedy=greedy), seed=i)
        for i, (prompt, length) in enumerate(zip(prompts.tolist(), lengths, strict=True))
    ]

    async def work() -> list[list[int]]:
        return [r.tokens.tolist() for r in await asyncio.gather(*map(engine.generate, requests))]

    return asyncio.run(work())


def run_generate(
    model: PreTrainedModel, prompts: torch.Tensor, lengths: Sequence[int], greedy: bool = False
) -> list[list[int]]:
    """Batches of SLOTS in the given order, each as long as its longest; completions are cut to their own length."""
    completions = []
    for start in range(0, len(prompts), SLOTS):
        batch, wanted = prompts[start : start + SLOTS], lengths[start : start + SLOTS]
        with torch.inference_mode():
            out = model.generate(
                batch, attention_mask=torch.ones_like(batch), max_new_tokens=max(wanted), do_sample=not greedy,
                pad_token_id=0, **({} if greedy else {"top_k": 0}),
            )  # fmt: skip
        completions += [row[PROMPT : PROMPT + length] for row, length in zip(out.tolist(), wanted, strict=True)]
    return completions


def compare(engine: HfEngine, model: PreTrainedModel, lengths: Sequence[int], rounds: int) -> dict[str, float]:
    """Tokens a second of both sides in their best rounds, and the ratio."""
    prompts = prompts_of(len(lengths))
    sides = (lambda: run_engine(engine, prompts, lengths), lambda: run_generate(model, prompts, lengths))
    speeds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for side, run in enumerate(sides):
            start = time.perf_counter()
            sampled = sum(map(len, run()))
            speeds[side].append(sampled / (time.perf_counter() - start))
            assert sampled == sum(lengths)
    ours, theirs = max(speeds[0]), max(speeds[1])
    return {
        "engine_tokens_per_second": round(ours, 1),
        "generate_tokens_per_second": round(theirs, 1),
        "ratio": round(ours / theirs, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    model = small_model()
    engine = HfEngine(
        "", model=copy.deepcopy(model), tokenizer=None, dtype="float32", device=torch.device("cpu"), max_slots=SLOTS,
        context_limit=CONTEXT, deterministic=False,
    )  # fmt: skip
    short = prompts_of(8)
    assert run_engine(engine, short, [40] * 8, greedy=True) == run_generate(model, short, [40] * 8, greedy=True)

    rounds, waves = (4, 1) if quick else (7, 2)
    tail = np.random.default_rng(2).lognormal(3.3, 1.0, 2 * waves * SLOTS).clip(4, CONTEXT - PROMPT)
    figures: dict[str, float] = {}
    for name, lengths in (("equal", [128] * SLOTS * waves), ("long_tail", tail.astype(int).tolist())):
        for key, value in compare(engine, model, lengths, rounds).items():
            figures[f"{name}_{key}"] = value
            print(f"{name:10s} {key:28s} {value}")
    engine.close()
    targets = {
        "equal_ratio": (">= 1.0", lambda ratio: ratio >= 1.0),
        "long_tail_ratio": (">= 1.5", lambda ratio: ratio >= 1.5),
    }
    return 0 if report("hf_engine", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
