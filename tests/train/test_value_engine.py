"""Value engines on one and on two gloo ranks against a plain padded computation in float64, and against themselves;
the models beside a policy on both."""

from __future__ import annotations

from pathlib import Path

import fsdp_world as world
import numpy as np
import pytest
import torch
import trainer_worlds
import transformers
import value_world
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model

from pekoe.pipeline.messages import TensorSpec

pytestmark = pytest.mark.trainers

SCRIPT = Path(value_world.__file__)
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip


def run_world(folder, size, *scenarios):
    """Scenario -> what rank 0 of one world found."""
    trainer_worlds.run_world(SCRIPT, folder, size, scenarios)
    (folder / f"meeting-{size}").unlink(missing_ok=True)
    return {name: torch.load(folder / f"{name}-{size}.pt", weights_only=False) for name in scenarios}


def add_score(source, target):
    """A classifier's folder: a causal model's tensors and a head, under the names of transformers."""
    tensors = load_file(source / "model.safetensors")
    hidden = tensors["model.norm.weight"].shape[0]
    torch.manual_seed(5)
    target.mkdir()
    head = {"score.weight": torch.randn(1, hidden)}
    kept = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file({**kept, **head}, target / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_text(file.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("value")
    configs = {
        "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
        "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    }
    for kind, config in configs.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / kind)
    add_score(path / "qwen3", path / "value-qwen3")
    add_score(write_tiny_model(path / "tiny"), path / "tiny-value")
    return path


@pytest.fixture(scope="module")
def results(folder):
    """Ranks -> scenario -> what rank 0 found; each number of ranks continues the other's checkpoint."""
    found = {2: run_world(folder, 2, "gradients", "save", "companions")}
    found[1] = run_world(folder, 1, "gradients", "save", "companions", "load")
    found[2] |= run_world(folder, 2, "load")
    return found


def plain_outputs(folder, kind, monkeypatch):
    """(model, head, outputs [S, T]): one padded batch through transformers; nothing of ours is used."""
    body = transformers.AutoModel.from_pretrained(folder / kind, dtype=torch.float64, attn_implementation="sdpa")
    for module in body.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", world.exact_rms_norm)
    tensors = load_file(folder / kind / "model.safetensors")
    head = tensors.get("score.weight", torch.zeros(1, SIZES["hidden_size"])).double()[0].requires_grad_()
    made = world.trajectories()
    ids, attend = torch.zeros(len(made), 12, dtype=torch.long), torch.zeros(len(made), 12)
    for row, trajectory in enumerate(made):
        ids[row, : len(trajectory.tokens)] = torch.from_numpy(trajectory.tokens)
        attend[row, : len(trajectory.tokens)] = 1
    states = body(input_ids=ids, attention_mask=attend, use_cache=False).last_hidden_state
    return body, head, states @ head


def plain_loss(outputs):
    """The loss of `value_world`, token by token."""
    loss = 0
    for row, trajectory in enumerate(world.trajectories()):
        tokens, (final,) = value_world.targets([row])
        for t in np.flatnonzero(trajectory.loss_mask):
            loss = loss + value_world.WEIGHTS[0] * (outputs[row, t - 1] - tokens[t]) ** 2
        loss = loss + value_world.WEIGHTS[1] * (outputs[row, len(trajectory.tokens) - 1] - final) ** 2
    return loss


@pytest.mark.parametrize("kind", ["value-qwen3", "llama"])
def test_loss_and_gradients_equal_the_padded_computation(results, folder, monkeypatch, kind):
    """For one and two ranks and every cut; a causal folder's head is 0, so its backbone gets no gradient yet."""
    body, head, outputs = plain_outputs(folder, kind, monkeypatch)
    loss = plain_loss(outputs)
    loss.backward()
    expected = {f"model.{name}": p.grad for name, p in body.named_parameters()} | {"score.weight": head.grad[None]}
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert expected["score.weight"].abs().max() > 0
    assert (expected["model.embed_tokens.weight"].abs().max() > 0) == (kind != "llama")
    for size in (1, 2):
        for cut in world.CUTS:
            stats, gradients = results[size]["gradients"][kind, cut]
            assert stats["loss"] == pytest.approx(float(loss.detach()), abs=1e-11)
            assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
            scale = min(1.0, 1 / (float(norm) + 1e-6))
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name] * scale, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("size", [1, 2])
def test_values_are_the_outputs_one_token_earlier(results, folder, monkeypatch, size):
    outputs = plain_outputs(folder, "value-qwen3", monkeypatch)[2].detach()
    (values, scores), empty = results[size]["gradients"]["value-qwen3", "values"]
    expected = [float(outputs[row, t - 1]) if t else 0.0 for row in (0, 1, 2) for t in range(world.LENGTHS[row])]
    np.testing.assert_allclose(values.numpy(), expected, atol=1e-12)
    last = [float(outputs[row, world.LENGTHS[row] - 1]) for row in (0, 1, 2)]
    np.testing.assert_allclose(scores.numpy(), last, atol=1e-12)
    assert [len(part) for part in empty] == [0, 0]
    fresh, _ = results[size]["gradients"]["llama", "values"]
    assert not fresh[0].any()
    assert not fresh[1].any()


@pytest.mark.parametrize("option", ["offload", "checkpointing"])
def test_options_change_nothing(results, option):
    for size in (1, 2):
        found = results[size]["gradients"]
        for name, gradient in found["value-qwen3", "uneven"][1].items():
            torch.testing.assert_close(found[option][1][name], gradient, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("size", [1, 2])
def test_checkpoint_continues_on_the_other_number_of_ranks(results, size):
    saved, found = results[3 - size]["save"], results[size]["load"]
    for name, tensor in saved["saved"].items():
        torch.testing.assert_close(found["loaded"][name], tensor, rtol=0, atol=0)
    assert saved["saved"]["score.weight"].abs().max() > 0
    assert found["stats"]["loss"] == pytest.approx(saved["stats"]["loss"], abs=1e-11)
    assert found["stats"]["grad_norm"] == pytest.approx(saved["stats"]["grad_norm"], rel=1e-11)
    for name, tensor in saved["final"].items():
        torch.testing.assert_close(found["final"][name], tensor, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(results[size]["save"]["final"][name], tensor, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_export_is_a_classifier_of_transformers(results, folder, size):
    saved = results[size]["save"]
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / f"export-{size}", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_labels == 1
    assert model.config.architectures == ["Qwen3ForSequenceClassification"]
    state = model.state_dict()
    assert state.keys() == saved["saved"].keys()
    for name, tensor in saved["saved"].items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
    assert saved["specs"][-1] == TensorSpec("score.weight", (1, 32), "float64")


def test_companions_say_the_same_on_any_number_of_ranks(results):
    """Two ranks hold other rows, in other packs, and different numbers of units."""
    one, two = results[1]["companions"], results[2]["companions"]
    assert set(one["scalar", "outcome"]) == set(two["scalar", "outcome"]) == {0, 1, 2, 3, 4}
    for key, rows in one.items():
        for row, extra in rows.items():
            assert extra.keys() == two[key][row].keys()
            for name, array in extra.items():
                np.testing.assert_allclose(array, two[key][row][name], atol=1e-6, rtol=1e-6, err_msg=f"{key} {name}")
    kinds = {key: set(rows[0]) for key, rows in one.items()}
    asked = {"ref_logprobs", "teacher_logprobs", "values", "bootstrap"}
    assert kinds == {
        ("scalar", "outcome"): asked | {"model_scores"},
        ("generative", "outcome"): asked | {"model_scores"},
        ("generative", "turn"): asked | {"turn_rewards"},
    }
