"""One side of `generation.py`, in a process of its own: an engine through its protocol, or transformers' `generate`.

Reads one JSON order a line from stdin and answers each with one line: `run` samples completions of given lengths,
`score` (the side `generate` alone) compares given tokens' log-probs with the plain model's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any, Protocol

import torch
from smollm2_material import context_limit

MAX_SLOTS = 128
"""Sequences that are decoded together, on every side."""


class Side(Protocol):
    """What is measured."""

    def run(self, prompts: list[list[int]], lengths: list[list[int]]) -> dict[str, Any]:
        """Samples for prompt i one completion of each of `lengths[i]`; gives seconds, tokens and some of the rows."""
        ...

    def close(self) -> None: ...


class EngineSide:
    """An engine as a rollout rank uses it."""

    def __init__(self, name: str, model: str, dtype: str) -> None:
        from pekoe.pipeline.config.vllm_section import VllmConfig
        from pekoe.pipeline.registry import INFERENCE_ENGINES, resolve
        from pekoe.pipeline.rollout.engine import EngineSettings, Instance

        settings = EngineSettings(
            path=model, tokenizer_path=model, dtype=dtype, device="cpu", device_index=0, max_slots=MAX_SLOTS,
            context_limit=context_limit(model), options=VllmConfig(),
        )  # fmt: skip
        self.engine = resolve(INFERENCE_ENGINES, name, "engine").build(settings, Instance(), on_failure)

    def run(self, prompts: list[list[int]], lengths: list[list[int]]) -> dict[str, Any]:
        from pekoe.pipeline.rollout.engine import GenerationRequest, SamplingParameters

        requests = [
            GenerationRequest(
                tuple(prompt), SamplingParameters(max_new_tokens=length, ignore_eos=True), seed=97 * row + sample,
                group=row, sample=sample, group_size=len(wanted),
            )
            for row, (prompt, wanted) in enumerate(zip(prompts, lengths, strict=True))
            for sample, length in enumerate(wanted)
        ]  # fmt: skip

        async def work() -> list[Any]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        began, cpu_began = time.perf_counter(), time.process_time()
        responses = asyncio.run(work())
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        assert [len(r.tokens) for r in responses] == [request.sampling.max_new_tokens for request in requests]
        rows = [
            {"prompt": list(q.tokens), "tokens": r.tokens.tolist(), "logprobs": r.logprobs.tolist()}
            for q, r in list(zip(requests, responses, strict=True))[:: max(1, len(requests) // 4)]
        ]
        tokens = sum(len(r.tokens) for r in responses)
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens, "rows": rows}

    def close(self) -> None:
        self.engine.close()


class GenerateSide:
    """The baseline: `model.generate` in left-padded batches of MAX_SLOTS, each as long as its longest completion."""

    def __init__(self, model: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None
        self.pad = AutoTokenizer.from_pretrained(model).pad_token_id or 0

    def run(self, prompts: list[list[int]], lengths: list[list[int]]) -> dict[str, Any]:
        began, cpu_began = time.perf_counter(), time.process_time()
        for batch, wanted in self.batches(prompts, lengths):
            width = max(map(len, batch))
            ids = torch.tensor([[self.pad] * (width - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
            with torch.inference_mode():
                out = self.model.generate(
                    ids, attention_mask=mask, max_new_tokens=max(map(max, wanted)), do_sample=True, top_k=0,
                    num_return_sequences=len(wanted[0]), pad_token_id=self.pad,
                )  # fmt: skip
            assert out.shape == (sum(map(len, wanted)), width + max(map(max, wanted)))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": sum(map(sum, lengths)), "rows": []}

    def batches(
        self, prompts: list[list[int]], lengths: list[list[int]]
    ) -> list[tuple[list[list[int]], list[list[int]]]]:
        step = max(1, MAX_SLOTS // len(lengths[0]))
        return [(prompts[i : i + step], lengths[i : i + step]) for i in range(0, len(prompts), step)]

    @torch.inference_mode()
    def score(self, rows: list[dict[str, Any]]) -> float:
        """The mean |difference| between the rows' log-probs and the plain model's."""
        gaps = []
        for row in rows:
            ids = torch.tensor([row["prompt"] + row["tokens"]])
            logprobs = self.model(ids).logits[0].float().log_softmax(-1)
            found = logprobs[len(row["prompt"]) - 1 : -1].gather(1, torch.tensor(row["tokens"])[:, None])[:, 0]
            gaps.append((found - torch.tensor(row["logprobs"])).abs())
        return float(torch.cat(gaps).mean())

    def close(self) -> None:
        pass


def on_failure(error: BaseException) -> None:
    print(f"the engine failed: {error!r}", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    name, model, dtype, threads = sys.argv[1:]
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(int(threads))
    side: Any = GenerateSide(model, dtype) if name == "generate" else EngineSide(name, model, dtype)
    answers.write(json.dumps("ready") + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "score":
            answer: Any = side.score(order["rows"])
        else:
            answer = side.run(order["prompts"], order["lengths"])
        answers.write(json.dumps(answer) + "\n")
    side.close()


if __name__ == "__main__":
    main()
