"""What a token costs, by a model's configuration: of experts those that it goes to, whatever their number is called."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers

from pekoe.pipeline.messages import TensorSpec
from pekoe.pipeline.runs.step_setup import token_work

SPECS = (
    TensorSpec("model.embed_tokens.weight", (100, 16), "float32"),
    TensorSpec("model.layers.0.self_attn.q_proj.weight", (16, 16), "float32"),
    TensorSpec("model.layers.0.self_attn.q_proj.bias", (16,), "float32"),
    TensorSpec("model.layers.0.mlp.experts.down_proj", (8, 16, 4), "float32"),
)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        (transformers.Qwen3MoeConfig, {"num_experts": 8}),
        (transformers.DeepseekV3Config, {"n_routed_experts": 8}),
        (transformers.PhimoeConfig, {"num_local_experts": 8}),
        (transformers.Qwen3Config, {}),
    ],
)
def test_experts_count_as_often_as_a_token_goes_to_them(tmp_path, kind, experts):
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 100, "head_dim": 4}
    kind(**sizes, **experts, **({"num_experts_per_tok": 2} if experts else {})).save_pretrained(tmp_path)
    work = token_work(
        SimpleNamespace(actor=SimpleNamespace(path=str(tmp_path))), SimpleNamespace(weight_specs=lambda: SPECS)
    )
    assert work.per_token == 2 * (16 * 16 + 8 * 16 * 4 * (2 / 8 if experts else 1))
    assert work.per_active == 2 * 16 * 100
