"""LoRA adapters: each samples as the merged model would, is replaced by version while requests run, and touches nobody
else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

pytestmark = pytest.mark.vllm

LIMIT = 1e-4
RANK, ALPHA = 3, 6
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def draw_adapter(model: PreTrainedModel, seed: int, rank: int = RANK) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(A [r, in], B [out, r]) for every linear layer of the blocks."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            first = torch.randn(rank, module.in_features, generator=generator) * 0.3
            drawn[name] = (first, torch.randn(module.out_features, rank, generator=generator) * 0.3)
    return drawn


def write_adapter(folder: Path, drawn: dict[str, tuple[torch.Tensor, torch.Tensor]], rank: int = RANK) -> Path:
    """In PEFT's format."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, (first, second) in drawn.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = first
        tensors[f"base_model.model.{name}.lora_B.weight"] = second
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Merged:
    """The same by transformers: log-probs of the model with an adapter added to its weights."""

    def __init__(self, models: Any, folder: Path) -> None:
        self.models = models
        self.model: PreTrainedModel = models.model(folder)
        self.folder = folder

    def logprobs(self, tokens: list[int], drawn: Any = None, seed: int | None = None) -> np.ndarray:
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.models.weights(self.folder, seed))
        with torch.inference_mode():
            for name, (first, second) in (drawn or {}).items():
                model.get_submodule(name).weight.add_(ALPHA / RANK * second @ first)
            logits = model(torch.tensor([tokens])).logits[0].double()
        picked = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        return np.concatenate([[0.0], picked.numpy()])


@pytest.fixture(scope="module")
def merged(vllm_models: Any) -> Merged:
    return Merged(vllm_models, vllm_models.folder())


@pytest.fixture
def engine(engines: Any) -> Any:
    """Built once: adapters stay from test to test, the model's own weights do not."""
    return engines(max_loras=2, max_lora_rank=5)


def load(engine: Any, name: str, folder: Path, version: int) -> None:
    engine.pause()
    try:
        engine.load_adapter(name, folder, version)
    finally:
        engine.resume()


def test_adapters_sample_as_the_merged_model_and_are_replaced_while_requests_run(
    engine: Any, engines: Any, merged: Merged, make_request: Any, prompts: Any, tmp_path: Path
) -> None:
    drawn = {version: draw_adapter(merged.model, version) for version in (4, 5)}
    folders = {version: write_adapter(tmp_path / str(version), drawn[version]) for version in drawn}
    load(engine, "agent", folders[4], 4)
    # Two prompts, each sampled by the model itself and by the adapter: nothing may be shared between the two.
    requests = [
        make_request(prompts[place], seed=seed, adapter=adapter, max_new_tokens=60)
        for place, seed in ((4, 1), (9, 2))
        for adapter in ("", "agent")
    ]
    responses = engines.interrupted(engine, requests, 4 * 20, lambda: engine.load_adapter("agent", folders[5], 5))
    for request, response in zip(requests, responses, strict=True):
        tokens = [*request.tokens, *response.tokens.tolist()]
        begin = len(request.tokens)
        if not request.adapter:
            assert set(response.versions.tolist()) == {0}
            np.testing.assert_allclose(response.logprobs, merged.logprobs(tokens)[begin:], atol=LIMIT)
            continue
        versions = response.versions
        assert versions.tolist() == sorted(versions.tolist())
        assert set(versions.tolist()) == {4, 5}
        expected = {version: merged.logprobs(tokens, drawn[version])[begin:] for version in drawn}
        for version in drawn:
            np.testing.assert_allclose(
                response.logprobs[versions == version], expected[version][versions == version], atol=LIMIT
            )
        assert np.abs(expected[4] - expected[5]).max() > 0.1, "the versions can be told apart"
        assert np.abs(expected[4] - merged.logprobs(tokens)[begin:]).max() > 0.1


def test_new_weights_of_the_model_keep_its_adapters(
    engine: Any, engines: Any, vllm_models: Any, merged: Merged, make_request: Any, prompts: Any, tmp_path: Path
) -> None:
    drawn = draw_adapter(merged.model, 7)
    load(engine, "agent", write_adapter(tmp_path / "a", drawn), 7)
    engine.pause()
    engine.load_weights(vllm_models.weights(merged.folder, 11).items(), 1)
    engine.resume()
    requests = [make_request(prompts[4], seed=3, adapter=adapter, max_new_tokens=20) for adapter in ("", "agent")]
    plain, adapted = engines.generate(engine, requests)
    for response, adapter, version in ((plain, None, 1), (adapted, drawn, 7)):
        tokens = [*prompts[4], *response.tokens.tolist()]
        expected = merged.logprobs(tokens, adapter, seed=11)[len(prompts[4]) :]
        np.testing.assert_allclose(response.logprobs, expected, atol=LIMIT)
        assert set(response.versions.tolist()) == {version}


def test_what_cannot_be_loaded_is_named_and_changes_nothing(
    engine: Any, engines: Any, merged: Merged, make_request: Any, prompts: Any, tmp_path: Path
) -> None:
    drawn = draw_adapter(merged.model, 1)
    good = write_adapter(tmp_path / "good", drawn)
    load(engine, "agent", good, 1)
    with pytest.raises(ValueError, match=r"request.adapter: 'other' is not loaded; allowed: agent"):
        engines.generate(engine, [make_request(prompts[0], adapter="other")])
    for folder, rank, change, problem in (
        ("large", 6, {}, r"rank 6; allowed: 1 to vllm.max_lora_rank \(5\)"),
        ("kind", RANK, {"peft_type": "IA3"}, "peft_type 'IA3' in .*kind; allowed: LORA"),
        ("dora", RANK, {"use_dora": True}, "DoRA"),
        ("modules", RANK, None, "expected target modules in .*self_attn.nothing"),
    ):
        bad = write_adapter(tmp_path / folder, draw_adapter(merged.model, 2, rank), rank)
        if change is None:
            unknown = {"base_model.model.model.layers.0.self_attn.nothing.lora_A.weight": torch.zeros(RANK, 4)}
            save_file(unknown, bad / "adapter_model.safetensors")
        else:
            config = json.loads((bad / "adapter_config.json").read_text())
            (bad / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=problem):
            load(engine, "agent", bad, 2)
    with pytest.raises(ValueError, match=r"adapter 'agent': .*adapter_config.json cannot be read"):
        load(engine, "agent", tmp_path / "nowhere", 2)
    load(engine, "second", good, 1)
    with pytest.raises(ValueError, match=r"adapter 'third': agent, second are loaded; allowed: vllm.max_loras \(2\)"):
        load(engine, "third", good, 1)
    (response,) = engines.generate(engine, [make_request(prompts[0], seed=1, adapter="agent", max_new_tokens=10)])
    tokens = [*prompts[0], *response.tokens.tolist()]
    assert set(response.versions.tolist()) == {1}
    np.testing.assert_allclose(
        response.logprobs, merged.logprobs(tokens, drawn)[len(prompts[0]) :], atol=LIMIT, err_msg="it is as before"
    )


def test_the_model_itself_is_scored_whatever_room_there_is_for_adapters(
    engines: Any, engine: Any, merged: Merged
) -> None:
    """As every update of a run does."""
    sequences = [[3, 4, 5, 6, 7, 8, 9], [4, 5, 6], [9]]
    engine.pause()
    found = engine.logprobs([np.asarray(sequence, dtype=np.int32) for sequence in sequences])
    engine.resume()
    for tokens, logprobs in zip(sequences, found, strict=True):
        np.testing.assert_allclose(logprobs, merged.logprobs(tokens), atol=LIMIT)


def test_without_room_for_adapters_they_are_refused(tmp_path: Path) -> None:
    from pekoe.pipeline.config.vllm_section import VllmConfig
    from pekoe.pipeline.rollout.engines.vllm.adapters import check_adapter, room_for

    with pytest.raises(ValueError, match=r"built without adapters; set vllm\.max_loras"):
        check_adapter("agent", tmp_path, [], VllmConfig())
    assert [room_for(rank) for rank in (1, 5, 8, 100, 512)] == [1, 8, 8, 128, 512]
    with pytest.raises(ValueError, match=r"vllm.max_lora_rank: 513; allowed: 1 to 512"):
        room_for(513)
