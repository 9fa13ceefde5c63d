"""Tiny real models and engines over them, for the tests of the hf engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from pekoe.pipeline.rollout.engine import GenerationRequest, Response, SamplingParameters
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine

VOCABULARY = 96
SECONDS = 60.0

CONFIGS: dict[str, type[Any]] = {
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "moe": Qwen3MoeConfig,
}


class Models:
    """Builds tiny models: same arguments, same weights."""

    def build(self, kind: str = "qwen3", seed: int = 0, **changes: Any) -> PreTrainedModel:
        settings: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
        }  # fmt: skip
        if kind in ("qwen3", "moe"):
            settings["head_dim"] = 16
        if kind == "moe":
            settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind](**settings | changes))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6)
        return model.eval()

    def logprobs(self, model: PreTrainedModel, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Token-aligned log-probs [T] by one plain forward pass, in float64; the first is 0."""
        plain = copy.deepcopy(model)
        plain.set_attn_implementation("eager")
        with torch.inference_mode():
            logits = plain(torch.tensor([list(tokens)])).logits[0].double() / temperature
        picked = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(list(tokens))[1:, None])[:, 0]
        return np.concatenate([[0.0], picked.numpy()])


class Harness:
    """Builds engines that are closed at the end of the test, and runs requests on them."""

    def __init__(self) -> None:
        self.engines: list[HfEngine] = []

    def engine(self, model: PreTrainedModel, **changes: Any) -> HfEngine:
        settings: dict[str, Any] = {
            "tokenizer": None, "dtype": str(model.dtype).removeprefix("torch."), "device": torch.device("cpu"),
            "max_slots": 8, "context_limit": 256, "deterministic": False,
        }  # fmt: skip
        engine = HfEngine("", model=copy.deepcopy(model), **settings | changes)
        self.engines.append(engine)
        return engine

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(asyncio.wait_for(work, SECONDS))

    def generate(self, engine: HfEngine, requests: Sequence[GenerationRequest]) -> list[Response]:
        """All requests at once."""

        async def work() -> list[Response]:
            return list(await asyncio.gather(*(engine.generate(request) for request in requests)))

        return self.run(work())


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models() -> Models:
    return Models()


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    for engine in made.engines:
        engine.close()


@pytest.fixture(scope="session")
def make_request() -> Callable[..., GenerationRequest]:
    """`make_request(prompt, seed=…, group=…, …, max_new_tokens=…, greedy=…, …)`."""
    names = set(SamplingParameters.__slots__)

    def make(tokens: Sequence[int], **fields: Any) -> GenerationRequest:
        sampling = {name: value for name, value in fields.items() if name in names}
        rest = {name: value for name, value in fields.items() if name not in names}
        return GenerationRequest(tuple(tokens), SamplingParameters(**sampling), **rest)

    return make


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, VOCABULARY, size).tolist() for size in (5, 17, 1, 9, 30, 12, 2, 21, 8, 40, 3, 14)]
