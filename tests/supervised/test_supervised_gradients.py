"""Losses and gradients through real engines, packed and cut, on one and two ranks, against transformers' own model on
padded sequences, all in float64."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsdp_world
import gradient_world
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from trainer_worlds import run_world

pytestmark = pytest.mark.trainers

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of one rank and of two: {(task, cut): (statistics, gradients)}."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gradients")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES))
    model.save_pretrained(folder / "qwen3")
    add_score(folder / "qwen3", folder / "scored")
    results = {}
    for size in (1, 2):
        run_world(Path(gradient_world.__file__), folder, size, [])
        results[size] = torch.load(folder / f"found-{size}.pt", weights_only=False)
    return folder, results


def add_score(source, target):
    """The model with a row of scores in place of its language-model head: with one of 0 nothing flows below it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    del tensors["lm_head.weight"]
    torch.manual_seed(5)
    save_file({**tensors, "score.weight": torch.randn(1, 32)}, target / "model.safetensors", metadata={"format": "pt"})


def padded(pad):
    """(ids, attention mask, labels, reference) [S, T], padded with `pad` on the right."""
    rows = gradient_world.sequences()
    longest = max(len(tokens) for tokens, _, _ in rows)
    arrays = []
    for which, fill in ((0, pad), (None, 0), (1, 0), (2, 0.0)):
        values = [np.ones(len(row[0]), np.int64) if which is None else row[which] for row in rows]
        arrays.append(
            torch.from_numpy(np.stack([np.pad(v, (0, longest - len(v)), constant_values=fill) for v in values]))
        )
    ids, mask, labels, reference = arrays
    return ids.long(), mask.long(), labels.bool(), reference


def expected(folder, task):
    """(loss, gradients by name) by transformers' model and textbook formulas; the padding looks like real tokens."""
    fsdp_world.use_exact_norms()
    ids, mask, labels, reference = padded(pad=7)
    if task == "rw":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder / "scored", num_labels=1, dtype=torch.float64
        )
        hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        scores = model.score(hidden).squeeze(-1)[torch.arange(len(ids)), mask.sum(dim=1) - 1]
        loss = -F.logsigmoid(scores[0::2] - scores[1::2]).mean()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float64)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        active, gap = labels[:, 1:], (logprobs - reference[:, 1:]) * labels[:, 1:]
        if task == "sft":
            loss = -(logprobs * active).sum() / active.sum()
        elif task == "dpo":
            sums = gap.sum(dim=1)
            loss = -F.logsigmoid(gradient_world.BETA * (sums[0::2] - sums[1::2])).mean()
        else:
            means = gap.sum(dim=1) / active.sum(dim=1)
            loss = ((means[0::2] - means[1::2] - 1 / (2 * gradient_world.BETA)) ** 2).mean()
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("task", ["sft", "dpo", "ipo", "rw"])
def test_losses_and_gradients_are_those_of_the_padded_model(found, task):
    folder, results = found
    loss, gradients = expected(folder, task)
    for size, by_case in results.items():
        for cut in gradient_world.CUTS:
            stats, own = by_case[task, cut]
            assert stats["loss"] == pytest.approx(loss, rel=1e-12), (size, cut)
            assert set(own) == set(gradients)
            for name, gradient in own.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-12, msg=f"{size} {cut} {name}")
