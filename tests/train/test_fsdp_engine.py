"""The fsdp engine on one and on two gloo ranks against a plain padded computation in float64, and against itself."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from trainer_worlds import run_world

from pekoe.pipeline.messages import TensorSpec

pytestmark = pytest.mark.trainers

SCRIPT = Path(__file__).with_name("fsdp_world.py")
SCENARIOS = ["forward", "gradients", "variants", "bfloat16", "skip", "save"]
LAST = {1: [*SCENARIOS, "flash", "leak", "load"], 2: SCENARIOS}
KINDS = ("qwen3", "qwen2", "llama")
ACTIVE_TOKENS = 26


def load_script():
    spec = importlib.util.spec_from_file_location("fsdp_world", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


world = load_script()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three tiny models with large weights, so that log-probs are far from uniform; one has tied embeddings."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("fsdp")
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    }  # fmt: skip
    configs = {
        "qwen3": transformers.Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=False),
        "qwen2": transformers.Qwen2Config(**sizes, tie_word_embeddings=False),
        "llama": transformers.LlamaConfig(**sizes, tie_word_embeddings=True),
    }
    for kind, config in configs.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / kind)
    (path / "qwen3" / "tokenizer.json").write_text('{"a": 1}')
    return path


@pytest.fixture(scope="module")
def results(folder):
    """(scenario, ranks) -> what rank 0 found; two ranks first, one continues their checkpoint."""
    for size in (2, 1):
        run_world(SCRIPT, folder, size, LAST[size])
    return {
        (name, size): torch.load(folder / f"{name}-{size}.pt", weights_only=False)
        for size, names in LAST.items()
        for name in names
    }


@pytest.fixture
def plain_model(folder, monkeypatch):
    def build(kind):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / kind, dtype=torch.float64, attn_implementation="sdpa"
        )
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                monkeypatch.setattr(type(module), "forward", world.exact_rms_norm)
        return model

    return build


def padded_logprobs(model):
    """[sequences][tokens] log-probs at the temperature and entropies, one padded batch; nothing of ours is used."""
    made = world.trajectories()
    longest = max(world.LENGTHS)
    ids, attend = torch.zeros(len(made), longest, dtype=torch.long), torch.zeros(len(made), longest)
    for row, trajectory in enumerate(made):
        ids[row, : len(trajectory.tokens)] = torch.from_numpy(trajectory.tokens)
        attend[row, : len(trajectory.tokens)] = 1
    logits = model(input_ids=ids, attention_mask=attend, use_cache=False).logits / world.TEMPERATURE
    logp = torch.log_softmax(logits, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return [
        {t: (logp[row, t - 1, ids[row, t]], entropy[row, t - 1]) for t in range(1, n) if made[row].loss_mask[t]}
        for row, n in enumerate(world.LENGTHS)
    ]


def plain_loss(found, aggregation):
    """Decoupled PPO written out token by token."""
    made, extras = world.trajectories(), world.extras()
    per_sequence = []
    for row, tokens in enumerate(found):
        terms = []
        for t, (logp, entropy) in tokens.items():
            advantage, prox = float(extras[row][0][t]), float(extras[row][1][t])
            weight = math.exp(prox - float(made[row].logprobs[t]))
            ratio = torch.exp(logp - prox)
            surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            terms.append((surrogate * weight if weight <= 5 else surrogate * 0) - 0.01 * entropy)
        per_sequence.append(terms)
    if aggregation == "sequence_mean":
        return sum(sum(terms) / len(terms) for terms in per_sequence) / len(per_sequence)
    total = sum(sum(terms) for terms in per_sequence)
    return total / (ACTIVE_TOKENS if aggregation == "token_mean" else len(made) * 12)


@pytest.mark.parametrize(
    ("kind", "aggregation"),
    [*((kind, "token_mean") for kind in KINDS), ("qwen3", "sequence_mean"), ("qwen3", "constant")],
)
def test_loss_and_gradients_equal_the_padded_computation(results, plain_model, kind, aggregation):
    """For one and two ranks, every cut in micro-batches (an empty one among them) and every order."""
    model = plain_model(kind)
    loss = plain_loss(padded_logprobs(model), aggregation)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    for size in (1, 2):
        for cut in world.CUTS:
            stats, gradients = results["gradients", size][kind, aggregation, cut]
            assert stats["loss"] == pytest.approx(float(loss.detach()), abs=1e-12)
            assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
            assert stats["tokens"] == ACTIVE_TOKENS
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("size", [1, 2])
def test_forward_gives_token_aligned_logprobs(results, plain_model, size):
    with torch.no_grad():
        found = padded_logprobs(plain_model("qwen3"))
    logprobs = results["forward", size]["logprobs"]
    for rows, packed in zip(([0, 1, 2], [], [4, 3]), logprobs, strict=True):
        expected = [found[row][t][0] if t in found[row] else 0.0 for row in rows for t in range(world.LENGTHS[row])]
        torch.testing.assert_close(packed, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("option", ["offload", "checkpointing"])
def test_options_change_nothing(results, option):
    for size in (1, 2):
        found = results["variants", size]
        for name, tensor in found["plain"][1].items():
            torch.testing.assert_close(found[option][1][name], tensor, atol=1e-12, rtol=1e-12)


def test_ranks_make_the_same_weights(results):
    for name, (_, weights) in results["variants", 1].items():
        for key, tensor in weights.items():
            torch.testing.assert_close(results["variants", 2][name][1][key], tensor, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_gradient_is_clipped_by_its_global_norm(results, size):
    (stats, gradients), _ = results["variants", size]["clipped"][0]
    (plain, unclipped), _ = results["variants", size]["plain"][0]
    assert stats["grad_norm"] == pytest.approx(plain["grad_norm"])
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, unclipped[name] * (0.01 / (plain["grad_norm"] + 1e-6)))


@pytest.mark.parametrize("size", [1, 2])
def test_bfloat16_trains_with_a_ratio_of_exactly_one(results, size):
    """Same packing, same kernels: nothing was trained, so no token may look off-policy."""
    found = results["bfloat16", size]
    assert found["stats"]["ratio"] == found["stats"]["tokens"] == ACTIVE_TOKENS
    assert found["stats"]["ratio_max"] == 1
    assert found["stats"]["clipped_lower"] == found["stats"]["clipped_higher"] == 0
    assert math.isfinite(found["stats"]["loss"])
    for name, before in found["before"].items():
        after = found["after"][name]
        assert after.dtype == torch.float32
        assert 0 < (after - before).abs().max() < 1e-2
        torch.testing.assert_close(found["weights"][name], after.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_infinite_gradient_on_one_rank_and_no_gradient_at_all_skip_the_update_on_all_ranks(results, size):
    found = results["skip", size]
    assert found["told"] == [(1.0, 1.0, True)] * size
    assert found["after"]["update_skipped"] == 0


@pytest.mark.parametrize("size", [1, 2])
def test_checkpoint_of_two_ranks_continues_on_one(results, size):
    saved = results["save", 2]
    if size == 1:
        found = results["load", 1]
        assert found["lr"] == 5e-4
        for name, tensor in saved["saved"].items():
            torch.testing.assert_close(found["loaded"][name], tensor, rtol=0, atol=0)
    else:
        found = results["save", 1]
    assert found["stats"]["loss"] == pytest.approx(saved["stats"]["loss"], abs=1e-12)
    for name, tensor in saved["final"].items():
        torch.testing.assert_close(found["final"][name], tensor, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_export_loads_with_transformers(results, folder, size):
    export = folder / f"export-{size}"
    assert not list(folder.glob("*.part"))
    assert (export / "tokenizer.json").read_text() == '{"a": 1}'
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert model.dtype == torch.float64
    state = model.state_dict()
    assert state.keys() == results["save", size]["saved"].keys()
    for name, tensor in results["save", size]["saved"].items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
    assert "pekoe" not in (export / "config.json").read_text()


def test_tied_weights_are_sent_under_both_names_and_trained_once(results, folder):
    gradients = results["gradients", 2]["llama", "token_mean", "one"][1]
    assert "model.embed_tokens.weight" in gradients
    assert "lm_head.weight" not in gradients
    with safe_open(folder / "llama" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_specs_describe_the_weights(results):
    found = results["forward", 2]
    assert [spec.name for spec in found["specs"]] == list(found["weights"])
    for spec, tensor in zip(found["specs"], found["weights"].values(), strict=True):
        assert spec == TensorSpec(spec.name, tuple(tensor.shape), "float64")


def test_flash_varlen_path_is_called_right_and_equals_sdpa(results):
    sdpa, flash = results["flash", 1]["sdpa"], results["flash", 1]["flash"]
    assert sdpa[1] == []
    assert len(flash[1]) == 2  # layers
    for query, key, cu_q, cu_k, max_q, max_k, causal, window in flash[1]:
        assert query == (22, 4, 8)
        assert key == (22, 2, 8)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert cu_q.tolist() == cu_k.tolist() == [0, 7, 10, 22]
        assert max_q == max_k == 12
        assert causal
        assert window == (-1, -1)
    torch.testing.assert_close(flash[0], sdpa[0], atol=0.02, rtol=0)
    assert flash[2][0]["grad_norm"] == pytest.approx(sdpa[2][0]["grad_norm"], rel=0.02)


def test_leaking_attention_is_refused_at_start(results):
    assert "packed sequences see each other" in results["leak", 1]
