"""The models beside a policy on one rank, against transformers' own classes, sequence by sequence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model

from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.algorithm.token_values import token_values
from pekoe.pipeline.config.actor import MicroBatchConfig
from pekoe.pipeline.config.companions import CriticConfig, RefConfig, RewardModelConfig, TeacherConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.devices.cpu_device import CpuDevice
from pekoe.pipeline.records import Finish, Trajectory, pack
from pekoe.pipeline.runs.companion_setup import build_companions, cut_evenly
from pekoe.pipeline.runs.trainer_setup import TrainerRank
from pekoe.pipeline.train.engines.fsdp_engine import FsdpEngine
from pekoe.pipeline.train.reward_models import unit_ends
from pekoe.pipeline.train.trainer_group import TrainerGroup
from pekoe.pipeline.train.vocabulary import check_same_vocabulary

WHERE = TrainerRank("fsdp", CpuDevice(), 0, 10)
PAD, EOS = 0, 1
TURNS = ((0, 0, 0), (-1, 0, 0, -1, 1, 1), (0, -1, 1, -1, -1, 2), (0,))
"""Of the tokens after each prompt; -1: not sampled."""


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy, another model of its vocabulary, and a classifier whose padding is a token of its data."""
    path = tmp_path_factory.mktemp("companions")
    write_tiny_model(path / "policy")
    write_tiny_model(path / "other", seed=1)
    shutil.copytree(path / "other", path / "judge")
    weights = load_file(path / "judge" / "model.safetensors")
    torch.manual_seed(2)
    weights["score.weight"] = torch.randn(1, 32)
    save_file(weights, path / "judge" / "model.safetensors", metadata={"format": "pt"})
    return path


def trajectories():
    """With padding and end tokens in the middle and at the end, and of several turns."""
    rng = np.random.default_rng(0)
    made = []
    for number, turns in enumerate(TURNS):
        marks = np.array([-1, -1, *turns], np.int32)
        tokens = rng.integers(3, 16, len(marks), dtype=np.int32)
        tokens[1], tokens[-1] = EOS, (PAD, EOS)[number % 2]
        mask = (marks >= 0).astype(np.uint8)
        zeros = np.zeros(len(marks), np.float32)
        finish = (Finish.STOP, Finish.LENGTH)[number % 2]
        one = Trajectory(tokens, mask, zeros, np.where(mask == 1, 0, -1).astype(np.int32), marks, 2, 0.0, finish)
        one.check()
        made.append(one)
    return made


def batches(*cuts):
    made = trajectories()
    return [pack([(row, made[row]) for row in rows]) for rows in cuts]


def settings(folder, **sections):
    config = RunConfig(**sections)
    config.actor.path, config.actor.dtype, config.rollout.dtype = str(folder / "policy"), "float32", "float32"
    return config


def asked(folder, cuts, temperature=0.7, **sections):
    """Batches that the companions have filled."""
    companions, made = build_companions(settings(folder, **sections), WHERE), batches(*cuts)
    companions.add(made, temperature)
    companions.close()
    return made


@cache
def plain_model(path):
    """By transformers; a classifier would take padding at the end for nothing."""
    if path.name != "judge":
        return transformers.AutoModelForCausalLM.from_pretrained(path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    model.config.pad_token_id = None
    return model


@torch.no_grad()
def plain_score(folder, tokens):
    """One sequence at a time."""
    return float(plain_model(folder / "judge")(input_ids=torch.tensor(tokens)[None].long()).logits)


@torch.no_grad()
def plain_logprobs(path, tokens, temperature):
    """[T], 0 on the first."""
    ids = torch.tensor(tokens).long()
    logp = torch.log_softmax(plain_model(path)(input_ids=ids[None]).logits[0].double() / temperature, dim=-1)
    return np.array([0.0, *logp[:-1].gather(1, ids[1:, None])[:, 0].tolist()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_policy_of_version_0_to_the_last_bit(group, folder, dtype):
    config = settings(folder, ref=RefConfig(dtype=dtype))
    policy = FsdpEngine(replace(config.actor, dtype=dtype), token_logprobs=token_logprobs, device=CpuDevice(), seed=1)
    cuts = [[0, 1, 2], [], [3]]
    found = policy.forward(batches(*cuts), 0.7)
    policy.close()
    for batch, logprobs in zip(asked(folder, cuts, ref=RefConfig(dtype=dtype)), found, strict=True):
        np.testing.assert_array_equal(batch.extra["ref_logprobs"], logprobs.numpy())
    assert found[0].abs().max() > 0


def test_teacher_logprobs_are_of_the_sampled_tokens_at_the_temperature(group, folder):
    teacher = TeacherConfig(path=str(folder / "other"), dtype="float32", offload_params=True)
    (batch,) = asked(folder, [[2, 1]], teacher=teacher)
    expected = [plain_logprobs(folder / "other", t.tokens, 0.7) * t.loss_mask for t in np.take(trajectories(), [2, 1])]
    np.testing.assert_allclose(batch.extra["teacher_logprobs"], np.concatenate(expected), atol=1e-5)
    assert not asked(folder, [[0]], teacher=TeacherConfig(place="engine"))[0].extra


def test_a_critic_bootstraps_truncated_sequences_alone(group, folder):
    (batch,) = asked(folder, [[0, 1, 3]], critic=CriticConfig(path=str(folder / "judge"), dtype="float32"))
    made = trajectories()
    scores = [plain_score(folder, made[row].tokens) for row in (1, 3)]
    np.testing.assert_allclose(batch.extra["bootstrap"], [0, *scores], atol=1e-5)
    values = batch.extra["values"]
    assert values[0] == 0
    np.testing.assert_allclose(values[3], plain_score(folder, made[0].tokens[:3]), atol=1e-5)
    (fresh,) = asked(folder, [[0, 1]], critic=CriticConfig(dtype="float32"))
    assert not fresh.extra["values"].any()


def test_a_score_is_the_same_alone_packed_and_in_any_order(group, folder):
    """And that of transformers, though padding and end tokens are among the sequences."""
    judge = RewardModelConfig(path=str(folder / "judge"), dtype="float32", weight=3.0)
    expected = [3 * plain_score(folder, one.tokens) for one in trajectories()]
    assert len({round(score, 3) for score in expected}) == 4
    for cuts in ([[0], [1], [2], [3]], [[0, 1, 2, 3]], [[3, 1], [], [2, 0]]):
        for batch, rows in zip(asked(folder, cuts, reward_model=judge), cuts, strict=True):
            scores = batch.extra["model_scores"]
            assert scores.dtype == np.float64
            np.testing.assert_allclose(scores, [expected[row] for row in rows], atol=2e-5)


def test_each_turn_is_scored_at_its_last_sampled_token_beside_what_it_had_earned(group, folder):
    judge = RewardModelConfig(path=str(folder / "judge"), dtype="float32", unit="turn", weight=0.5)
    companions, (batch,) = build_companions(settings(folder, reward_model=judge), WHERE), batches([1, 2])
    assert unit_ends(batch, "turn").tolist() == [4, 7, 10, 12, 15]
    batch.extra["turn_rewards"] = np.where(np.arange(batch.num_tokens) == 7, np.float32(10), np.float32(0))
    companions.add([batch], 1.0)
    companions.close()
    expected = np.zeros(batch.num_tokens)
    expected[7] = 10
    for end in (4, 7, 10, 12, 15):
        start = 0 if end < 8 else 8
        expected[end] += 0.5 * plain_score(folder, batch.tokens[start : end + 1])
    np.testing.assert_allclose(batch.extra["turn_rewards"], expected, atol=1e-5)
    assert "model_scores" not in batch.extra


@pytest.mark.parametrize("budget", [8192, 12, 4])
def test_the_probability_of_an_answer_after_a_question(group, folder, budget):
    """Whatever fits into a micro-batch; a row that question and answer made too long goes alone."""
    judge = RewardModelConfig(
        path=str(folder / "other"), dtype="float32", kind="generative", weight=2.0, question="= ", answer="42"
    )
    question, answer = [15, 16], [7, 5]
    made = trajectories()

    def probability(tokens):
        logprobs = plain_logprobs(folder / "other", [*tokens, *question, *answer], 1.0)
        return 2 * np.exp(logprobs[-2:].sum())

    for unit in ("outcome", "turn"):
        config = settings(folder, reward_model=replace(judge, unit=unit))
        config.actor.mb_spec.max_tokens_per_mb = budget
        companions, (batch, empty, more) = build_companions(config, WHERE), batches([1, 0], [], [3, 2])
        companions.add([batch, empty, more], 0.7)
        companions.close()
        if unit == "outcome":
            np.testing.assert_allclose(
                batch.extra["model_scores"], [probability(made[row].tokens) for row in (1, 0)], rtol=1e-4
            )
            assert len(empty.extra["model_scores"]) == 0
            np.testing.assert_allclose(
                more.extra["model_scores"], [probability(made[row].tokens) for row in (3, 2)], rtol=1e-4
            )
        else:
            ends = np.flatnonzero(batch.extra["turn_rewards"])
            assert ends.tolist() == [4, 7, 12]
            prefixes = [made[1].tokens[:5], made[1].tokens, made[0].tokens]
            np.testing.assert_allclose(
                batch.extra["turn_rewards"][ends], [probability(tokens) for tokens in prefixes], rtol=1e-4
            )


def test_a_model_that_is_only_asked_has_no_optimiser_and_the_compute_dtype(group, folder):
    companions = build_companions(settings(folder, ref=RefConfig(offload_params=True)), WHERE)
    engine = companions.reference
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    assert engine._optimizer is None
    for what in (lambda: engine.stage(), lambda: engine.train_batch([], None), lambda: engine.set_progress(0.5)):
        with pytest.raises(AssertionError, match="ref: the model is only asked"):
            what()
    with pytest.raises(AssertionError, match="ref: a language-model head gives no values"):
        engine.forward_values([])
    companions.close()


def test_heads_that_do_not_fit(group, folder, tmp_path):
    with pytest.raises(ValueError, match=r"missing \['score.weight'\]"):
        build_companions(settings(folder, reward_model=RewardModelConfig(dtype="float32")), WHERE)
    shutil.copytree(folder / "judge", tmp_path / "two")
    weights = load_file(tmp_path / "two" / "model.safetensors")
    weights["score.weight"] = torch.zeros(2, 32)
    save_file(weights, tmp_path / "two" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"score.weight has shape \[2, 32\], the model \(1, 32\)"):
        build_companions(settings(folder, critic=CriticConfig(path=str(tmp_path / "two"), dtype="float32")), WHERE)
    with pytest.raises(ValueError, match=r"critic.path: '/nowhere' is not a model folder"):
        build_companions(settings(folder, critic=CriticConfig(path="/nowhere")), WHERE)
    with pytest.raises(ValueError, match=r"head: 'value' is not allowed; lm .with token_logprobs. or value"):
        FsdpEngine(CriticConfig(), head="value", token_logprobs=token_logprobs, device=CpuDevice(), seed=1)
    with pytest.raises(ValueError, match="head: 'scores' is not allowed"):
        FsdpEngine(CriticConfig(), head="scores", token_values=token_values, device=CpuDevice(), seed=1)
    empty = RewardModelConfig(path=str(folder / "other"), kind="generative", answer="")
    with pytest.raises(ValueError, match=r"reward_model.answer: '' has no tokens"):
        build_companions(settings(folder, reward_model=empty), WHERE)


def test_micro_batches_of_questions_keep_the_budget(group):
    limits = MicroBatchConfig(max_tokens_per_mb=10, max_sequences_per_mb=2)
    cut = cut_evenly(limits, TrainerGroup(torch.device("cpu")))
    lengths = [7, 3, 10, 2, 2, 2]
    parts = cut(lengths)
    assert sorted(index for part in parts for index in part) == list(range(6))
    assert all(sum(lengths[index] for index in part) <= 10 and len(part) <= 2 for part in parts)
    assert cut([14]) == [[0]]
    assert cut([]) == []


def write_vocabulary(folder: Path, source: Path, change):
    shutil.copytree(source, folder)
    file = folder / "tokenizer.json"
    contents = json.loads(file.read_text())
    change(contents["model"]["vocab"])
    file.write_text(json.dumps(contents))
    return str(folder)


def test_a_model_of_another_vocabulary_is_refused_by_a_token(folder, tmp_path):
    policy = str(folder / "policy")

    def swap(vocabulary):
        vocabulary["7"], vocabulary["+"] = vocabulary["+"], vocabulary["7"]

    other = write_vocabulary(tmp_path / "swapped", folder / "other", swap)
    with pytest.raises(ValueError, match=r"teacher.path: .*token '7' is 10 in .* and 13 here \(2 such tokens\)"):
        check_same_vocabulary("teacher", other, policy, policy)
    larger = write_vocabulary(tmp_path / "larger", folder / "other", lambda vocabulary: vocabulary.update(x=17))
    check_same_vocabulary("teacher", larger, policy, policy)
    check_same_vocabulary("teacher", policy, str(folder / "other"), larger)  # no policy of 17 tokens writes an 'x'
    facts = json.loads((Path(larger) / "config.json").read_text())
    (Path(larger) / "config.json").write_text(json.dumps({**facts, "vocab_size": 18}))
    with pytest.raises(ValueError, match=r"token 'x' is 17 in .* and nothing here"):
        check_same_vocabulary("teacher", policy, larger, larger)
    (Path(larger) / "config.json").write_text(json.dumps(facts))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(larger) / name).unlink()
    check_same_vocabulary("critic", larger, policy, policy)
    (Path(larger) / "config.json").write_text(json.dumps({**facts, "vocab_size": 20}))
    with pytest.raises(ValueError, match=r"critic.path: .* has 20 tokens and no tokenizer, the policy 17"):
        check_same_vocabulary("critic", larger, policy, policy)
