"""Tiny models of each family, and what must hold for an engine that serves one.

python tests/vllm/model_families.py FAMILY FOLDER TOKENIZER      builds it in FOLDER, serves it and checks it
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel

from pekoe.pipeline.config.vllm_section import VllmConfig
from pekoe.pipeline.rollout.engine import EngineSettings, GenerationRequest, Instance, Response, SamplingParameters

VOCABULARY = 64
TEMPERATURE = 0.8
LIMIT = 1e-4
SECONDS = 60.0
NEW_TOKENS = 24

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
VISION_IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def vision_language() -> PreTrainedModel:
    """Qwen2.5-VL with a vision tower of one block."""
    vision = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [0],
    }  # fmt: skip
    text = TEXT | {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]}}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **VISION_IDS
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT | {"tie_word_embeddings": True})),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, head_dim=32)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TEXT, **EXPERTS, head_dim=32)),
    "qwen2.5-vl": vision_language,
}
TEXT_ONLY = {"qwen2.5-vl": {"limit_mm_per_prompt": {"image": 0, "video": 0}}}
"""Engine arguments of families that could take more than text."""


def build(family: str, seed: int) -> PreTrainedModel:
    """A tiny model whose distributions are far from uniform; same arguments, same weights."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def serve(family: str, folder: Path, tokenizer: Path) -> Any:
    """The engine of the family's first weights, which are written to `folder`."""
    from pekoe.pipeline.rollout.engines.vllm.vllm_engine import VllmEngine

    build(family, 0).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    settings = EngineSettings(
        path=str(folder), tokenizer_path=str(folder), dtype="float32", device="cpu", device_index=0, max_slots=4,
        context_limit=128, options=VllmConfig(extra=TEXT_ONLY.get(family, {})),
    )  # fmt: skip
    return VllmEngine.build(settings, Instance())


def check(family: str, engine: Any) -> None:
    """It samples and scores as transformers does, before and after new weights; prompts share their prefix."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, min(VISION_IDS.values()), size).tolist() for size in (40, 40, 7, 1)]
    prompts[1] = prompts[0]
    previous = None
    for version in (0, 1):
        model = build(family, version)
        if version:
            engine.pause()
            engine.load_weights(model.state_dict().items(), version)
            engine.resume()
        responses = generate(engine, prompts)
        whole = [[*prompt, *response.tokens.tolist()] for prompt, response in zip(prompts, responses, strict=True)]
        for prompt, response, tokens in zip(prompts, responses, whole, strict=True):
            assert len(response.tokens) == NEW_TOKENS
            assert set(response.versions.tolist()) == {version}
            own = logprobs(model, tokens)[len(prompt) :]
            np.testing.assert_allclose(response.logprobs, own, atol=LIMIT)
            if previous is not None:
                old = logprobs(previous, tokens)[len(prompt) :]
                assert np.abs(old - own).max() > 0.1, "the two sets of weights can be told apart"
        assert responses[0].tokens.tolist() != responses[1].tokens.tolist()
        engine.pause()
        scored = engine.logprobs([np.array(tokens, np.int32) for tokens in whole], TEMPERATURE)
        engine.resume()
        for tokens, given in zip(whole, scored, strict=True):
            np.testing.assert_allclose(given, logprobs(model, tokens), atol=LIMIT)
        previous = model


def generate(engine: Any, prompts: Sequence[Sequence[int]]) -> list[Response]:
    sampling = SamplingParameters(max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE, top_p=0.9, ignore_eos=True)

    async def work() -> list[Response]:
        requests = [GenerationRequest(tuple(prompt), sampling, seed=i) for i, prompt in enumerate(prompts)]
        async with asyncio.timeout(SECONDS):
            return list(await asyncio.gather(*(engine.generate(request) for request in requests)))

    return asyncio.run(work())


def logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """Token-aligned log-probs [T] by one plain forward pass; the first is 0."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].double() / TEMPERATURE
    picked = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(list(tokens))[1:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()])


if __name__ == "__main__":
    served = serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    check(sys.argv[1], served)
    served.close()
    print("checked", sys.argv[1])
