"""Engines that share prefixes against engines that do not, in float64, on one and on two gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharing_world
import torch
import transformers
from test_value_engine import add_score
from trainer_worlds import run_world

pytestmark = pytest.mark.trainers

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
KINDS = ("qwen3", "llama", "window", "value")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Ranks -> what rank 0 found."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("sharing")
    configs = {
        "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
        "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "window": transformers.MistralConfig(**SIZES, sliding_window=10, tie_word_embeddings=False),
    }
    for kind, config in configs.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / kind)
    add_score(path / "qwen3", path / "value")
    for size in (2, 1):
        run_world(Path(sharing_world.__file__), path, size, ["sharing"])
    return {size: torch.load(path / f"sharing-{size}.pt", weights_only=False) for size in (1, 2)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_outputs_losses_and_gradients_are_those_without_sharing(results, size, kind):
    plain, (stats, gradients, _) = results[size][kind, False]
    shared, (found, shared_gradients, _) = results[size][kind, True]
    assert max(float(one.abs().max()) for one in plain if len(one)) > 1
    for one, other in zip(plain, shared, strict=True):
        torch.testing.assert_close(other, one, atol=1e-10, rtol=1e-10)
    assert found["grad_norm"] == pytest.approx(stats["grad_norm"], rel=1e-10)
    assert found["seen"] == pytest.approx(stats["seen"], rel=1e-10)
    assert gradients.keys() == shared_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0 or "k_proj.bias" in name, name
        torch.testing.assert_close(shared_gradients[name], gradient, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_runs_on_shared_tokens_once(results, kind):
    for share in (False, True):
        sizes = results[1][kind, share][1][2]
        lengths = [[11, 7, 20, 13, 7, 7], [13, 13], [89, 15, 15, 15], [18, 18, 18, 9], [1]]
        saved = [2 * 6 + 6, 9, 2 * 14, 2 * 12, 0] if share else [0] * 5
        expected = [sum(part) - less for part, less in zip(lengths, saved, strict=True)]
        assert sizes == expected
