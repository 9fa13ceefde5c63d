"""Log-probs from hidden states and the last layer's weight, against those of the model's own logits."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.config.actor import ActorConfig, FsdpConfig
from pekoe.pipeline.config.optimizer import OptimizerConfig
from pekoe.pipeline.devices.cpu_device import CpuDevice
from pekoe.pipeline.train.engines import fsdp_engine
from pekoe.pipeline.train.engines.fsdp_engine import FsdpEngine
from pekoe.pipeline.train.engines.isolation import pack_tokens

TEMPERATURE = 0.7
LENGTHS = (9, 2, 14)
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN = {
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "phi": transformers.PhiConfig(**SIZES, tie_word_embeddings=False),
}
"""Linear last layers: tied to the embeddings, of its own, with a bias."""
CHANGED = {
    "gemma2": transformers.Gemma2Config(
        **SIZES, head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=30.0, query_pre_attn_scalar=8
    ),
    "granite": transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    "cohere": transformers.CohereConfig(**SIZES, logit_scale=0.25),
}
"""Logits that are capped, divided, multiplied."""


@pytest.fixture(scope="module", autouse=True)
def group():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("heads")
    for kind, config in (PLAIN | CHANGED).items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        if kind == "phi":
            torch.nn.init.normal_(model.lm_head.bias)
        model.save_pretrained(path / kind)
    return path


def build(path, dtype="float64", **more):
    config = ActorConfig(path=str(path), dtype=dtype, optimizer=OptimizerConfig(lr=0.0), **more)
    return FsdpEngine(config, token_logprobs=token_logprobs, device=CpuDevice(), seed=1)


@cache
def plain_engine(path):
    """Built once: tests that share it leave it as it was."""
    return build(path)


def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(3, 61, length, dtype=np.int32) for length in LENGTHS]


class Mixed:
    """A loss in which every log-prob and entropy has a weight of its own; keeps the log-probs."""

    needs_entropy_gradient = True

    def __call__(self, logprobs, entropy, batch):
        self.logprobs, self.entropy = logprobs.detach(), entropy.detach()
        weight = torch.arange(len(logprobs)).cos()
        return (logprobs * weight + entropy * weight.flip(0)).sum(), {}


def update(engine):
    """(loss with log-probs, gradients) of one update on all sequences and on a batch without active tokens."""
    gradients, step, loss = {}, engine.optimizer.step, Mixed()
    engine.optimizer.step = lambda: gradients.update(
        {name: p.grad.full_tensor().clone() for name, p in engine.model.named_parameters()}
    )
    engine.train_batch([pack_tokens([]), pack_tokens(sequences())], loss, TEMPERATURE)
    engine.optimizer.step = step
    return loss, gradients


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in PLAIN),
        ("llama", {"gradient_checkpointing": True}),
        ("llama", {"fsdp": FsdpConfig(offload_params=True)}),
    ],
)
def test_logprobs_entropies_and_gradients_are_those_of_logits(folder, kind, options):
    engine = build(folder / kind, **options) if options else plain_engine(folder / kind)
    assert not engine._head.by_logits
    fused, gradients = update(engine)
    engine._head.by_logits = True
    whole, expected = update(engine)
    engine._head.by_logits = False
    assert fused.logprobs.dtype == torch.float64
    torch.testing.assert_close(fused.logprobs, whole.logprobs, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(fused.entropy, whole.entropy, atol=1e-12, rtol=1e-12)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_sees_the_logprobs_of_the_forward_pass_to_the_last_bit(folder, dtype):
    engine = build(folder / "llama", dtype)
    (before,) = engine.forward([pack_tokens(sequences())], TEMPERATURE)
    loss, _ = update(engine)
    assert before.dtype == torch.float32
    torch.testing.assert_close(loss.logprobs, before, atol=0, rtol=0)
    assert before.abs().max() > 0


@torch.no_grad()
def plain_logprobs(path):
    """[M] by transformers alone, a sequence at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    found = []
    for tokens in sequences():
        ids = torch.from_numpy(tokens).long()
        logp = torch.log_softmax(model(input_ids=ids[None]).logits[0] / TEMPERATURE, dim=-1)
        found += [torch.zeros(1, dtype=torch.float64), logp[:-1].gather(1, ids[1:, None])[:, 0]]
    return torch.cat(found)


@pytest.mark.parametrize("kind", PLAIN)
def test_logprobs_are_those_of_transformers(folder, kind):
    (found,) = plain_engine(folder / kind).forward([pack_tokens(sequences())], TEMPERATURE)
    torch.testing.assert_close(found, plain_logprobs(folder / kind), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", CHANGED)
def test_a_model_that_changes_its_logits_is_computed_by_them_and_the_log_says_so(folder, kind, caplog):
    engine = build(folder / kind)
    (found,) = engine.forward([pack_tokens(sequences())], TEMPERATURE)
    torch.testing.assert_close(found, plain_logprobs(folder / kind), atol=1e-5, rtol=0)
    (said,) = [record.getMessage() for record in caplog.records if "whole logits" in record.getMessage()]
    assert said.startswith("actor: the log-probs of ")
    assert "it changes the logits" in said


def test_large_logits_in_half_precision_are_rounded_and_not_another_models(folder, tmp_path):
    """Up to some hundreds, where neighbours in bfloat16 are 2 apart."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    model.lm_head.weight.data *= 60
    model.save_pretrained(tmp_path)
    assert not build(tmp_path, "bfloat16")._head.by_logits


def test_on_accelerators_sharing_without_checkpointing_is_warned_of_once(folder, monkeypatch, caplog):
    """They copy prompts where a processor merges; these engines run on one."""

    def warnings(**options):
        caplog.clear()
        config = ActorConfig(path=str(folder / "llama"), optimizer=OptimizerConfig(lr=0.0), **options)
        FsdpEngine(config, token_logprobs=token_logprobs, share_prefixes=True, device=CpuDevice(), seed=1)
        return [record.getMessage() for record in caplog.records if "prefix sharing" in record.getMessage()]

    assert warnings() == []
    monkeypatch.setattr(fsdp_engine, "merges", lambda device_type: False)
    (said,) = warnings()
    assert "actor.gradient_checkpointing" in said
    assert warnings(gradient_checkpointing=True) == []


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(out) if torch.is_tensor(leaf)]
        self.elements = max([self.elements, *sizes])
        return out


def test_no_tensor_holds_every_logit(tmp_path):
    """Of 600 tokens over a vocabulary of 20,000."""
    torch.manual_seed(0)
    wide = transformers.LlamaConfig(**SIZES | {"vocab_size": 20_000, "max_position_embeddings": 1024})
    transformers.AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path)
    engine = build(tmp_path, "float32")
    batch = pack_tokens([np.arange(601, dtype=np.int32) % 500])
    with LargestTensor() as seen:
        engine.forward([batch], TEMPERATURE)
        engine.train_batch([batch], Mixed(), TEMPERATURE)
    weights = sum(p.numel() for p in engine.model.parameters())
    assert 20_000 * 32 <= seen.elements <= max(2 * weights, 300 * 20_000)
    engine._head.by_logits = True
    with LargestTensor() as seen:
        engine.forward([batch], TEMPERATURE)
    assert seen.elements >= 600 * 20_000, "the test sees logits where there are some"
