"""What the keys of the objective, the task and the models beside the policy ask of each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pekoe.launch.allocation import parse
from pekoe.pipeline.config.check import check
from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.config.schema import ConfigError

BASE = ["actor.path=model", "train_dataset.path=train.jsonl", "gconfig.max_tokens=1024"]
SAPO = ["actor.objective=sapo", "actor.use_decoupled_loss=false", "actor.rejection_sampling=null"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
        for file in ("model.safetensors", "tokenizer.json"):
            (tmp_path / name / file).write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def warnings(*overrides: str, allocation: str | None = None) -> list[str]:
    return check(from_yaml_text("", [*BASE, *overrides]), parse(allocation) if allocation else None)


def problems(*overrides: str, allocation: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        warnings(*overrides, allocation=allocation)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["actor.objective=pppo"], "actor.objective", "did you mean ppo?); allowed: cispo, ppo, sapo, or module:"),
        (["actor.advantage_estimator=ga"], "actor.advantage_estimator", "did you mean gae?); allowed: gae, or module"),
        (["actor.kl_ctl=0.1"], "actor.kl_ctl", "0.1 needs a reference model; allowed: 0, or a ref section"),
        (["actor.kl_loss_coef=0.1"], "actor.kl_loss_coef", "needs a reference model"),
        (["actor.objective=cispo"], "actor.eps_clip_higher", "null is not allowed with actor.objective cispo"),
        (
            ["actor.objective=cispo", "actor.eps_clip=null", "actor.eps_clip_higher=4"],
            "actor.eps_clip",
            "null is not allowed with actor.objective cispo",
        ),
        (["actor.objective=sapo"], "actor.use_decoupled_loss", "true is not allowed with actor.objective sapo"),
        (
            ["actor.m2_threshold=0.04", "actor.use_decoupled_loss=false", "actor.rejection_sampling=null"],
            "actor.m2_threshold",
            "0.04 needs actor.use_decoupled_loss",
        ),
        (
            ["actor.m2_threshold=0.04", "actor.prox_logp_method=loglinear"],
            "actor.m2_threshold",
            "allowed: null, or prox_logp_method recompute or metrics",
        ),
        (
            ["actor.overlong_reward_penalty=true", "actor.overlong_tokens=513"],
            "actor.overlong_tokens",
            "513 is not allowed with overlong_reward_penalty; allowed: 1 to gconfig.max_new_tokens (512)",
        ),
        (["rollout.dynamic_batch_size=true"], "rollout.dynamic_batch_size", "needs rollout.dynamic_sampling"),
        (
            ["rollout.dynamic_sampling=true", "gconfig.n_samples=1", "actor.reward_norm=null"],
            "gconfig.n_samples",
            "rollout.dynamic_sampling drops such groups; allowed: >= 2",
        ),
        (
            ["rollout.dynamic_sampling=true", "reward_model.path=other"],
            "rollout.dynamic_sampling",
            "is not allowed with a reward_model",
        ),
        (
            ["gconfig.n_samples=1", "actor.reward_norm=null", "actor.adv_norm.mean_level=group"],
            "gconfig.n_samples",
            "makes every advantage 0 with actor.adv_norm.mean_level group; allowed: >= 2",
        ),
        (["critic.optimizer.beta1=1", "algorithm=ppo"], "critic.optimizer.beta1", "1.0 is not allowed; allowed: < 1"),
        (["task=distill"], "teacher", "null is not allowed in task distill"),
        (["teacher.path=other"], "teacher.rl_loss_weight", "0.0 leaves rewards out of task rl; allowed: > 0, or task"),
        (
            ["task=distill", "teacher.path=other", "algorithm=ppo"],
            "critic.path",
            "has no use in task distill with teacher.rl_loss_weight 0 (distillation alone); allowed: critic: null",
        ),
        (
            ["algorithm=dapo", "task=distill", "teacher.path=other"],
            "rollout.dynamic_sampling",
            "true is not allowed with teacher.rl_loss_weight 0: it drops groups of equal rewards, from which the "
            "policy learns as well; allowed: rollout.dynamic_sampling=false (algorithm dapo turns it on)",
        ),
        (
            ["task=distill", "teacher.path=other", "teacher.rl_loss_weight=0.1", "gconfig.n_samples=1"],
            "gconfig.n_samples",
            "makes every advantage 0",
        ),
        (["reward_model={}"], "reward_model.path", "kind scalar needs a model that task rw has made"),
        (["task=sft", "train_dataset.type=demonstrations", "algorithm=ppo"], "critic.path", "has no use in task sft"),
        (["task=rw", "train_dataset.type=preferences", "ref={}"], "ref.path", "has no use in task rw"),
        (["task=dpo", "train_dataset.type=preferences", "actor.mb_spec.granularity=4"], "actor.mb_spec.granularity",
         "allowed: 1 or 2 (pairs stay together in any case)"),
        (["task=sft", "train_dataset.type=demonstrations", "actor.mb_spec.granularity=2"],
         "actor.mb_spec.granularity", "is not allowed in task sft; allowed: 1"),
        (["task=rw", "train_dataset.type=preferences", "actor.mb_spec.max_sequences_per_mb=1"],
         "actor.mb_spec.max_sequences_per_mb", "holds no pair of task rw; allowed: >= 2, or null"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused(overrides: list[str], key: str, words: str) -> None:
    (line,) = problems(*overrides)
    assert line.startswith(f"{key}: ")
    assert words in line


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["ref={}"], "ref.path", "is asked in vain: set actor.kl_ctl or actor.kl_loss_coef, or ref=null"),
        ([*SAPO, "actor.c_clip=3"], "actor.c_clip", "has no effect with actor.objective sapo"),
        ([*SAPO[:2]], "actor.rejection_sampling.metric", "has no effect without actor.use_decoupled_loss"),
        ([*SAPO, "actor.importance_sampling_level=sequence"], "actor.importance_sampling_level", "is not published"),
        (["actor.prox_logp_method=reuse", "actor.ppo_epochs=2"], "actor.prox_logp_method", "each of the 2 updates"),
        (
            ["actor.overlong_reward_penalty=true", "actor.mask_truncated=true"],
            "actor.mask_truncated",
            "leaves out the sequences",
        ),
        (["actor.gae_lambda=0.9"], "actor.gae_lambda", "without a critic only weakens"),
        (["actor.gae_lambda_by_length=vapo"], "actor.gae_lambda_by_length", "without a critic only weakens"),
        (
            ["algorithm=ppo", "actor.gae_lambda=0.9", "actor.gae_lambda_by_length=relative"],
            "actor.gae_lambda",
            "has no effect with actor.gae_lambda_by_length",
        ),
        (["critic={}"], "actor.reward_norm.mean_level", "whose baseline is the critic"),
        (
            ["algorithm=ppo", "critic.warmup_steps=5", "total_train_steps=5"],
            "critic.warmup_steps",
            "leaves no step to the policy (total_train_steps 5)",
        ),
        (["algorithm=ppo", "critic=null"], "critic", "null leaves algorithm ppo without its baseline"),
        (["rollout.max_resampled_groups=4"], "rollout.max_resampled_groups", "without rollout.dynamic_sampling"),
        (
            ["algorithm=dapo", "rollout.dynamic_batch_size=true", "rollout.max_resampled_groups=4"],
            "rollout.max_resampled_groups",
            "nothing is replaced",
        ),
        (["task=distill", "teacher={}"], "teacher.path", "there is nothing to learn from it"),
        (
            ["task=distill", "teacher.path=other", "actor.entropy_coef=0.1"],
            "actor.entropy_coef",
            "the policy learns from the teacher alone",
        ),
        (["reward_model.path=other", "reward_model.weight=0"], "reward_model.weight", "has no effect"),
        (
            ["task=sft", "train_dataset.type=demonstrations", "algorithm=rloo"],
            "algorithm",
            "has no effect in task sft",
        ),
        (["task=sft", "train_dataset.type=demonstrations", "actor.ppo_epochs=3"], "actor.ppo_epochs", "a step is one"),
    ],
)
def test_what_is_rarely_meant_is_warned_about(overrides: list[str], key: str, words: str) -> None:
    (line,) = warnings(*overrides)
    assert line.startswith(f"{key}: ")
    assert words in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.objective=mine.objectives:soft", "actor.advantage_estimator=mine:best"],
        ["actor.kl_ctl=0.1", "ref={}"],
        ["actor.kl_loss_coef=0.1", "ref.path=other"],
        ["actor.m2_threshold=0.04", "actor.prox_logp_method=metrics"],
        ["actor.overlong_reward_penalty=true", "actor.overlong_tokens=512"],
        ["algorithm=ppo", "gconfig.n_samples=1", "actor.gae_lambda=0.95", "actor.gae_unit=turn"],
        ["algorithm=ppo", "gconfig.n_samples=1", "actor.adv_norm.mean_level=group"],
        ["algorithm=ppo", "actor.gae_lambda_by_length=vapo", "critic.ppo_epochs=4", "actor.ppo_epochs=2"],
        ["algorithm=dapo", "rollout.dynamic_batch_size=true"],
        ["task=distill", "teacher.path=other"],
        ["task=distill", "teacher.path=other", "teacher.rl_loss_weight=0.5", "algorithm=ppo"],
        ["teacher.path=other", "teacher.rl_loss_weight=1"],
        ["reward_model.kind=generative", "gconfig.max_tokens=1000"],
        ["algorithm=dapo", "task=distill", "teacher.path=other", "rollout.dynamic_sampling=false"],
        ["task=distill", "teacher.path=other", "gconfig.n_samples=1"],
        ["task=sft", "train_dataset.type=demonstrations", "gconfig.n_samples=1", "gconfig.max_new_tokens=2000"],
        ["task=dpo", "train_dataset.type=preferences", "train_dataset.max_length=100"],
        ["task=rw", "train_dataset.type=preferences", "actor.mb_spec.granularity=2"],
    ],
)
def test_what_fits_together_passes_without_a_word(overrides: list[str]) -> None:
    assert warnings(*overrides) == []


def test_the_paths_of_models_beside_the_policy_are_looked_for() -> None:
    assert problems("algorithm=ppo", "critic.path=./gone") == [
        "critic.path: './gone' does not exist; allowed: an existing local path"
    ]
    lines = problems("actor.kl_ctl=1", "ref.path=no/such/ref", "task=distill", "teacher.path=no/such/teacher")
    assert [line.partition(":")[0] for line in lines] == ["ref.path", "teacher.path"]


def test_a_scalar_reward_model_is_a_sequence_classifier(folder: Path) -> None:
    """The score would be one of a head that nobody has trained."""
    about = folder / "other" / "config.json"
    about.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (line,) = problems("reward_model.path=other")
    assert line.startswith("reward_model.path: 'other' has no trained head")
    assert "allowed: its folder, or reward_model.kind: generative" in line
    assert warnings("reward_model.path=other", "reward_model.kind=generative") == []
    assert len(problems("reward_model={}")) == 1
    about.write_text(json.dumps({"architectures": ["Qwen3ForSequenceClassification"]}))
    assert warnings("reward_model.path=other") == []


def write_model(folder: Path, context: int, size: int, vocabulary: object = None) -> None:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context, "vocab_size": size}))
    added = [{"id": 3, "content": "<end>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("critic", ["algorithm=ppo"]),
        ("ref", ["actor.kl_ctl=0.1"]),
        ("teacher", ["task=distill"]),
        ("reward_model", ["reward_model.kind=generative"]),
    ],
)
def test_a_model_beside_the_policy_takes_its_longest_sequence(folder: Path, name: str, overrides: list[str]) -> None:
    (folder / "other" / "config.json").write_text(json.dumps({"max_position_embeddings": 700}))
    given = [*overrides, f"{name}.path=other", "gconfig.max_new_tokens=256"]
    assert problems(*given) == [
        f"{name}.path: 'other' has a context of 700 tokens, and the run's sequences have up to 1024; allowed: a model "
        "that takes them, or gconfig.max_tokens <= 700"
    ]
    found = warnings(*given, "gconfig.max_tokens=700")
    if name == "reward_model":
        assert "sequences have up to 700, with question and answer about 708; advised: gconfig.max_tokens" in found[0]
    else:
        assert found == []


def test_the_reference_of_dpo_takes_the_longest_labelled_sequence(folder: Path) -> None:
    (folder / "other" / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    given = ["task=dpo", "train_dataset.type=preferences", "ref.path=other"]
    (line,) = problems(*given, "train_dataset.max_length=101")
    assert line.startswith("ref.path: 'other' has a context of 100 tokens, and the run's sequences have up to 101;")
    assert warnings(*given, "train_dataset.max_length=100") == []


@pytest.mark.parametrize("place", ["trainer", "engine"])
def test_a_teacher_has_the_policys_vocabulary(folder: Path, place: str) -> None:
    given = ["task=distill", "teacher.path=other", f"teacher.place={place}"]
    write_model(folder / "model", 1024, 8, {"a": 0, "b": 1, "c": 2})
    write_model(folder / "other", 1024, 16, [["a", -1.0], ["b", -2.0], ["c", -2.5]])
    assert warnings(*given) == []
    write_model(folder / "other", 1024, 16, {"a": 0, "b": 2, "c": 1})
    (line,) = problems(*given)
    assert line.startswith("teacher.path: 'other' has another vocabulary than the policy: token 'b' is 1 in ")
    assert line.endswith("and 2 here (2 such tokens); allowed: a model with the policy's vocabulary")
    write_model(folder / "other", 1024, 3, {"a": 0, "b": 1, "c": 2})
    assert "has embeddings for 3 tokens, and the policy's ids go up to 3; allowed: " in problems(*given)[0]
    write_model(folder / "model", 1024, 3, {"a": 0, "b": 1, "c": 2})
    assert warnings(*given) == [], "ids that the policy has no embedding for are never written"
    write_model(folder / "model", 1024, 8, {"a": 0, "b": 1, "c": 2})
    (folder / "other" / "tokenizer.json").unlink()
    assert "has 3 tokens and no tokenizer, the policy 8; allowed: " in problems(*given)[0]


def test_a_task_has_the_ranks_that_it_needs() -> None:
    sft = ["task=sft", "train_dataset.type=demonstrations"]
    assert warnings(*sft, allocation="fsdp:d2") == []
    (line,) = problems(*sft, allocation="hf:d1+fsdp:d1")
    assert "has a rollout part, and task sft samples nothing; allowed: a trainer part alone" in line
    assert warnings(*sft, "train_dataset.batch_size=4", allocation="fsdp:d4") == []
    assert "8 trainer ranks for 4 sequences" in warnings(*sft, "train_dataset.batch_size=4", allocation="fsdp:d8")[0]
    pairs = ["task=dpo", "train_dataset.type=preferences", "train_dataset.batch_size=4"]
    assert warnings(*pairs, allocation="fsdp:d8") == []
    assert "has no rollout part" in problems("task=distill", "teacher.path=other", allocation="fsdp:d1")[0]


def test_a_teacher_beside_the_engine_needs_engines_of_one_rank() -> None:
    teacher = ["task=distill", "teacher.path=other", "teacher.place=engine"]
    assert warnings(*teacher, allocation="hf:d2+fsdp:d1") == []
    lines = problems(*teacher, allocation="vllm:d1t2+fsdp:d1")
    (line,) = [line for line in lines if line.startswith("teacher.place")]
    assert "is not possible with inference engines of 2 ranks; allowed: trainer, or engines of one rank" in line
