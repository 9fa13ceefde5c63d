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


SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100, "head_dim": 4}


def work_of(folder, config):
    config.save_pretrained(folder)
    return token_work(
        SimpleNamespace(actor=SimpleNamespace(path=str(folder))), SimpleNamespace(weight_specs=lambda: SPECS)
    )


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        (transformers.Qwen3MoeConfig, {"num_experts": 8, "num_experts_per_tok": 2}),
        (transformers.DeepseekV3Config, {"n_routed_experts": 8, "num_experts_per_tok": 2}),
        (transformers.PhimoeConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
        (transformers.Gemma4TextConfig, {"num_experts": 8, "top_k_experts": 2}),
        (transformers.HunYuanMoEV1Config, {"num_experts": 8, "moe_topk": [1, 3]}),
        (transformers.Ernie4_5_MoeConfig, {"moe_num_experts": 8, "moe_k": 2}),
        (transformers.Qwen3Config, {}),
    ],
)
def test_experts_count_as_often_as_a_token_goes_to_them(tmp_path, kind, experts):
    work = work_of(tmp_path, kind(**SIZES, **experts))
    assert work.per_token == 2 * (16 * 16 + 8 * 16 * 4 * (2 / 8 if experts else 1))
    assert work.per_active == 2 * 16 * 100


def test_a_pair_costs_by_the_sizes_of_keys_and_values(tmp_path):
    assert work_of(tmp_path / "one size", transformers.Qwen3Config(**SIZES)).per_pair == 4 * 2 * 4 * 4
    parted = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    latent = transformers.DeepseekV3Config(**(SIZES | {"head_dim": 4}), **parted)
    assert work_of(tmp_path / "latent", latent).per_pair == 2 * 2 * 4 * (8 + 4 + 6)


@pytest.mark.parametrize(
    "config",
    [
        transformers.Gemma4TextConfig(**SIZES, num_experts=8),
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=100),
        transformers.HunYuanMoEV1Config(**(SIZES | {"head_dim": None}), num_experts=8, moe_topk=[]),
    ],
    ids=lambda config: config.model_type,
)
def test_what_a_configuration_does_not_say_leaves_a_rough_figure(tmp_path, config):
    work = work_of(tmp_path, config)
    assert work.per_token == 2 * (16 * 16 + 8 * 16 * 4)
    assert (work.per_pair > 0) == hasattr(config, "num_attention_heads")
