"""Tiny real models and real vLLM engines over them, for all tests that need vLLM.

A process can hold one engine at a time; `engines(...)` gives the one that is there when it was built with the same
settings, with the model's own weights, and else builds another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from pekoe.pipeline.config.vllm_section import VllmConfig
from pekoe.pipeline.rollout.engine import EngineSettings, GenerationRequest, Instance, Response, SamplingParameters

SECONDS = 60.0
CONTEXT = 256
CONFIGS: dict[str, type[Any]] = {
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "moe": Qwen3MoeConfig,
}


class VllmModels:
    """Tiny checkpoints with a head size that vLLM serves, and the character tokenizer of `scripts/tiny_model.py`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: dict[str, Path] = {}
        self._models: dict[Path, PreTrainedModel] = {}

    def folder(self, kind: str = "qwen3", **changes: Any) -> Path:
        """Same arguments, same checkpoint. `changes` are of the configuration."""
        name = "-".join([kind, *(f"{key}_{value}" for key, value in sorted(changes.items()))])
        if name not in self._folders:
            self._folders[name] = self._write(self._folder / name, kind, changes)
        return self._folders[name]

    def model(self, folder: Path) -> PreTrainedModel:
        """The checkpoint by transformers, in float32."""
        if folder not in self._models:
            self._models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return self._models[folder]

    def weights(self, folder: Path, seed: int | None = None) -> dict[str, torch.Tensor]:
        """What a trainer sends: all names, tied ones included; with a seed, another policy."""
        state = {name: tensor.clone() for name, tensor in self.model(folder).state_dict().items()}
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for tensor in state.values():
                if tensor.ndim > 1:
                    tensor.add_(torch.randn(tensor.shape, generator=generator) * tensor.std(), alpha=0.3)
        for name, other in (getattr(self.model(folder), "all_tied_weights_keys", None) or {}).items():
            state[name] = state[other]
        return state

    def logprobs(
        self, folder: Path, tokens: Sequence[int], temperature: float = 1.0, seed: int | None = None
    ) -> np.ndarray:
        """Token-aligned log-probs [T] of one plain forward pass; the first is 0."""
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)])
            logits = self.forward(folder, self.weights(folder, seed), ids)
            picked = torch.log_softmax(logits.double() / temperature, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        return np.concatenate([[0.0], picked.numpy()])

    def forward(self, folder: Path, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of the model with these weights; ids [1, T]."""
        logits: torch.Tensor = torch.func.functional_call(self.model(folder), weights, (ids,), tie_weights=False).logits
        return logits[0]

    def _write(self, folder: Path, kind: str, changes: dict[str, Any]) -> Path:
        write_tiny_model(folder)
        settings: dict[str, Any] = {
            "vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
        }  # fmt: skip
        if kind in ("qwen3", "moe"):
            settings["head_dim"] = 32
        if kind == "moe":
            settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind](**settings | changes), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        model.save_pretrained(folder)
        return folder


class VllmEngines:
    """Builds engines, one at a time, and runs requests on them."""

    def __init__(self, models: VllmModels) -> None:
        self.models = models
        self.engine: Any = None
        self._settings: EngineSettings | None = None

    def __call__(self, folder: Path | None = None, **changes: Any) -> Any:
        """An engine that serves version 0 of the folder; `changes` are of the settings, and of the vllm section."""
        settings = self.settings(folder, **changes)
        engine = self.engine
        gauges = {} if engine is None else engine.gauges()
        usable = gauges.get("serving") == 1 and gauges["running"] == gauges["waiting"] == 0
        if not usable or settings != self._settings:
            return self.build(settings)
        engine.pause()
        engine.load_weights(self.models.weights(Path(settings.path)).items(), 0)
        engine.resume()
        return engine

    def settings(self, folder: Path | None = None, **changes: Any) -> EngineSettings:
        options = {name: changes.pop(name) for name in list(changes) if name in VllmConfig.__dataclass_fields__}
        path = str(self.models.folder() if folder is None else folder)
        fields: dict[str, Any] = {
            "path": path, "tokenizer_path": path, "dtype": "float32", "device": "cpu", "device_index": 0,
            "max_slots": 8, "context_limit": CONTEXT, "options": VllmConfig(**options),
        }  # fmt: skip
        return EngineSettings(**fields | changes)

    def build(self, settings: EngineSettings, on_failure: Callable[[BaseException], None] | None = None) -> Any:
        """Closes the engine that is there and builds another."""
        from pekoe.pipeline.rollout.engines.vllm.vllm_engine import VllmEngine

        self.close()
        self.engine = VllmEngine.build(settings, Instance(), on_failure)
        self._settings = settings
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine, self._settings = None, None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(asyncio.wait_for(work, SECONDS))

    def generate(self, engine: Any, requests: Sequence[GenerationRequest]) -> list[Response]:
        """All requests at once."""

        async def work() -> list[Response]:
            return list(await asyncio.gather(*(engine.generate(request) for request in requests)))

        responses: list[Response] = self.run(work())
        return responses

    def interrupted(
        self, engine: Any, requests: Sequence[GenerationRequest], tokens: int, between: Callable[[], None]
    ) -> list[Response]:
        """All requests at once; when `tokens` more are sampled the engine is paused, `between` runs, it goes on."""
        with ThreadPoolExecutor(1) as pool:
            goal = engine.gauges()["tokens"] + tokens
            running = pool.submit(self.generate, engine, requests)
            while engine.gauges()["tokens"] < goal and not running.done():
                time.sleep(0.0005)
            try:
                engine.pause()
                between()
                engine.resume()
                return running.result(SECONDS)
            except BaseException:
                self.close()  # else the pool waits for ever
                raise


@pytest.fixture(scope="session")
def vllm_models(tmp_path_factory: pytest.TempPathFactory) -> VllmModels:
    return VllmModels(tmp_path_factory.mktemp("vllm-models"))


@pytest.fixture(scope="module")
def engines(vllm_models: VllmModels) -> Iterator[VllmEngines]:
    made = VllmEngines(vllm_models)
    yield made
    made.close()


@pytest.fixture(scope="session")
def make_request() -> Callable[..., GenerationRequest]:
    """`make_request(prompt, seed=…, group=…, …, max_new_tokens=…, greedy=…, …)`; end tokens do not end it."""
    names = set(SamplingParameters.__slots__)

    def make(tokens: Sequence[int], **fields: Any) -> GenerationRequest:
        sampling = {"ignore_eos": True} | {name: value for name, value in fields.items() if name in names}
        rest = {name: value for name, value in fields.items() if name not in names}
        return GenerationRequest(tuple(tokens), SamplingParameters(**sampling), **rest)

    return make


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Of uneven lengths; every token has a character."""
    generator = np.random.default_rng(5)
    return [generator.integers(3, 16, size).tolist() for size in (5, 17, 1, 9, 70, 12, 2, 21, 8, 40, 3, 14)]
