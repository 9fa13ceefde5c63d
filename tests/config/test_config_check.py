"""Checks before anything starts: limits, cross-checks, files of models and data sets, all problems at once."""

from __future__ import annotations

import copy
import json
import os
import socket
import time
from pathlib import Path

import pytest

from pekoe.launch.allocation import parse
from pekoe.pipeline.config.check import check, context_limit, wrong_limits, wrong_types
from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.config.paths import resolve_paths
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import ConfigError, all_keys


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a complete model and a data set; every connection fails."""
    make_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def refuse(*_: object) -> None:
        raise AssertionError("a socket was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path


def make_model(path: Path, context: int | None = 1024) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": context} if context else {}))
    (path / "model.safetensors").write_bytes(b"")
    (path / "tokenizer.json").write_text("{}")


BASE = ["actor.path=model", "train_dataset.path=train.jsonl", "gconfig.max_tokens=1024"]


def checked(*overrides: str, allocation: str | None = None) -> list[str]:
    config = from_yaml_text("", [*BASE, *overrides])
    return check(config, parse(allocation) if allocation else None)


def problems(*overrides: str, allocation: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(*overrides, allocation=allocation)
    return list(caught.value.problems)


def test_a_sound_configuration_passes_without_warnings(folder: Path) -> None:
    assert checked() == []
    assert checked("algorithm=gspo", allocation="hf:d2|fsdp:d2") == []


def test_every_declared_limit_is_enforced() -> None:
    config = from_yaml_text(
        "",
        [
            "valid_dataset.path=x",
            "eval_gconfig.top_k=1",
            "actor.adv_norm.eps=1",
            "cluster.rollout_nodes.n_nodes=1",
            *(f"{section}={{}}" for section in ("critic", "ref", "teacher", "reward_model")),
        ],
    )
    assert wrong_limits(config) == []
    enforced = 0
    for key in all_keys():
        if key.is_section:
            continue
        for value in _outside(key):
            lines = wrong_limits(_with(config, key.name, value))
            assert len(lines) == 1, (key.name, value, lines)
            assert lines[0].startswith(f"{key.name}: ")
            assert lines[0].endswith(f" is not allowed; allowed: {key.allowed}")
            enforced += 1
    assert enforced > 180


def _outside(key) -> list[object]:
    values: list[object] = []
    if key.choices is not None:
        values.append("no such choice")
    if key.minimum is not None:
        values.append(key.minimum - 1)
    if key.above is not None:
        values.append(key.above)
    if key.maximum is not None:
        values.append(key.maximum + 1)
    if key.type is float:
        values += [float("nan"), float("inf")]
    return values


def _with(config: RunConfig, name: str, value: object) -> RunConfig:
    changed = copy.deepcopy(config)
    section: object = changed
    *parents, last = name.split(".")
    for parent in parents:
        section = getattr(section, parent)
    setattr(section, last, value)
    return changed


def test_wrong_types_of_a_config_made_by_code_are_found() -> None:
    config = RunConfig(seed="3 seeds")  # type: ignore[arg-type]
    config.actor.eps_clip = "wide"  # type: ignore[assignment]
    assert wrong_types(config) == [
        "seed: '3 seeds' is not a whole number; allowed: a whole number >= 0",
        "actor.eps_clip: 'wide' is not a number; allowed: a number > 0, or null",
    ]
    with pytest.raises(ConfigError, match="2 problems"):
        check(config)


def test_all_problems_are_listed_at_once(folder: Path) -> None:
    lines = problems(
        "actor.eps_clip=0", "gconfig.top_p=0", "actor.path=nowhere/at/all", "train_dataset.path=gone.jsonl"
    )
    assert [line.partition(":")[0] for line in lines] == [
        "gconfig.top_p",
        "actor.eps_clip",
        "actor.path",
        "train_dataset.path",
    ]
    assert lines[1] == "actor.eps_clip: 0.0 is not allowed; allowed: a number > 0, or null"


REJECT = "actor.rejection_sampling"
STALENESS = "rollout.max_head_offpolicyness"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["actor.c_clip=1"], "actor.c_clip", "allowed: a number > 1, or null"),
        (["actor.eps_clip=null", "actor.eps_clip_higher=0.3"], "actor.eps_clip_higher", "needs actor.eps_clip"),
        ([f"{REJECT}.action=clamp", f"{REJECT}.metric=kl_k2"], f"{REJECT}.action", "allowed: mask, or metric ratio"),
        ([f"{REJECT}.upper=0.9"], f"{REJECT}.upper", "allowed: >= 1"),
        ([f"{REJECT}.lower=1.5"], f"{REJECT}.lower", "allowed: <= 1"),
        ([f"{REJECT}.upper=null"], f"{REJECT}.upper", "bound nothing"),
        ([f"{REJECT}.metric=kl_k3", f"{REJECT}.upper=-1"], f"{REJECT}.upper", "allowed: >= 0"),
        (
            ["rollout.deterministic=true", "rollout.max_head_offpolicyness=1"],
            "rollout.max_head_offpolicyness",
            "allowed: 0",
        ),
        (
            ["rollout.deterministic=true", "rollout.max_head_offpolicyness=null"],
            "rollout.max_head_offpolicyness",
            "null is",
        ),
        (["actor.ppo_n_minibatches=65"], "actor.ppo_n_minibatches", "allowed: <= 64 = train_dataset.batch_size x"),
        (["actor.mb_spec.granularity=2", "actor.ppo_n_minibatches=33"], "actor.ppo_n_minibatches", "allowed: <= 32"),
        (["actor.mb_spec.granularity=3"], "actor.mb_spec.granularity", "a divisor of gconfig.n_samples (8)"),
        (
            ["actor.mb_spec.granularity=2", "actor.mb_spec.max_sequences_per_mb=1"],
            "actor.mb_spec.max_sequences_per_mb",
            "allowed: >= granularity (2)",
        ),
        (
            ["actor.enable_tree_training=true", "actor.mb_spec.max_sequences_per_mb=1"],
            "actor.enable_tree_training",
            "allowed: >= 2, or null",
        ),
        (["actor.enable_tree_training=true", "actor.disable_dropout=false"], "actor.disable_dropout", "allowed: true"),
        (["gconfig.n_samples=1"], "gconfig.n_samples", "allowed: >= 2"),
        (["gconfig.min_new_tokens=600"], "gconfig.min_new_tokens", "allowed: <= gconfig.max_new_tokens (512)"),
        (
            ["actor.adv_norm.mean_level=null", "actor.adv_norm.mean_leave1out=true"],
            "actor.adv_norm.mean_leave1out",
            "mean",
        ),
        (["actor.optimizer.beta2=1"], "actor.optimizer.beta2", "allowed: < 1"),
        (["cluster.heartbeat_seconds=20"], "cluster.heartbeat_seconds", "allowed: <= 5 "),
        (["cluster.silence_seconds=3"], "cluster.heartbeat_seconds", "allowed: <= 1 "),
        (["evaluator.freq_steps=5"], "evaluator.freq_steps", "needs a valid_dataset"),
        (["evaluator.at_start=true"], "evaluator.at_start", "needs a valid_dataset"),
        (["trial_name=a/b"], "trial_name", "it names a folder"),
        (["trial_name="], "trial_name", "it names a folder"),
        (["experiment_name=.."], "experiment_name", "it names a folder"),
        (["reward.name=maths"], "reward.name", "did you mean math?"),
        (["workflow.name=rlvrr"], "workflow.name", "did you mean rlvr?"),
        (["train_dataset.type=gsm8"], "train_dataset.type", "did you mean gsm8k?"),
    ],
)
def test_contradictions_are_refused(folder: Path, overrides: list[str], key: str, words: str) -> None:
    (line,) = problems(*overrides)
    assert line.startswith(f"{key}: ")
    assert words in line


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([f"{REJECT}=null"], REJECT, "unbounded"),
        (
            ["actor.enable_tree_training=true", "gconfig.n_samples=1", "actor.reward_norm=null"],
            "actor.enable_tree_training",
            "has no effect with gconfig.n_samples 1",
        ),
        (["actor.use_decoupled_loss=false"], f"{REJECT}.metric", "no effect"),
        (
            ["actor.use_decoupled_loss=false", f"{REJECT}=null", "actor.prox_logp_method=reuse"],
            "actor.prox_logp_method",
            "no",
        ),
        ([f"{REJECT}.agg=max"], f"{REJECT}.agg", "no effect at level token"),
        (["actor.importance_sampling_level=sequence"], "actor.loss_aggregation", "GSPO"),
        (["gconfig.greedy=true"], "gconfig.greedy", "nothing is learned"),
        (["gconfig.top_p=0.9"], "gconfig.top_p", "biased"),
        (["gconfig.frequency_penalty=0.5"], "gconfig.frequency_penalty", "biased"),
        (["gconfig.logit_bias={5: 1}"], "gconfig.logit_bias", "biased"),
        (["gconfig.top_k=5"], "gconfig.top_k", "biased"),
        (["train_dataset.max_length=600"], "gconfig.max_tokens", "cuts completions"),
        (["rollout.episode_seconds=3000"], "cluster.progress_seconds", "ends the run"),
        (["reward.timeout_seconds=700"], "reward.timeout_seconds", "not below"),
        (["valid_dataset.path=train.jsonl"], "valid_dataset.type", "never used"),
    ],
)
def test_what_is_rarely_meant_is_warned_about(folder: Path, overrides: list[str], key: str, words: str) -> None:
    (line,) = checked(*overrides)
    assert line.startswith(f"{key}: ")
    assert words in line


def test_user_code_is_named_by_module_and_attribute(folder: Path) -> None:
    assert checked("reward.name=my.rewards:judge", "workflow.name=flows:Mine", "train_dataset.type=data:Mine") == []


def test_every_sequence_fits_a_micro_batch(folder: Path) -> None:
    assert "context limit (1024 tokens)" in problems("actor.mb_spec.max_tokens_per_mb=1023")[0]
    assert checked("actor.mb_spec.max_tokens_per_mb=1024") == []
    pairs = problems("actor.mb_spec.max_tokens_per_mb=2047", "actor.mb_spec.granularity=2")
    assert "context limit (1024 tokens x granularity 2)" in pairs[0]
    assert "above the model's context; allowed: <= 1024" in problems("gconfig.max_tokens=1025")[0]
    assert "leaves no room for a prompt; allowed: < 1024" in problems("gconfig.max_new_tokens=1024")[0]
    assert "eval_gconfig.max_new_tokens: 2000" in problems("eval_gconfig.max_new_tokens=2000")[0]
    make_model(folder / "endless", None)
    assert "context limit (unlimited tokens)" in problems("actor.path=endless", "gconfig.max_tokens=null")[0]
    assert checked("actor.path=endless", "gconfig.max_tokens=null", "train_dataset.max_length=100") == []


def test_the_context_limit_is_the_nearest_of_what_is_known() -> None:
    def limit(model: int | None, *overrides: str) -> int | None:
        return context_limit(from_yaml_text("", list(overrides)), model)

    assert limit(None) is None
    assert limit(4096) == 4096
    assert limit(4096, "gconfig.max_tokens=100") == 100
    assert limit(50, "gconfig.max_tokens=100") == 50
    assert limit(4096, "train_dataset.max_length=100", "gconfig.max_new_tokens=20") == 120
    assert limit(None, "train_dataset.max_length=100", "gconfig.max_tokens=110") == 110


def test_a_placement_fits_the_machine_and_the_task(folder: Path) -> None:
    tight = ["cluster.n_nodes=1", "cluster.n_gpus_per_node=2"]
    assert checked(*tight, allocation="hf:d1+fsdp:d1") == []
    assert "has 3 ranks; allowed: <= cluster.n_nodes x" in problems(*tight, allocation="hf:d1+fsdp:d2")[0]
    assert "has no rollout part" in problems(allocation="fsdp:d1")[0]
    few = ["train_dataset.batch_size=1", "gconfig.n_samples=2"]
    assert "4 trainer ranks for 2 sequences" in checked(*few, allocation="hf:d1+fsdp:d4")[0]


def test_paths_become_absolute_and_are_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    config = from_yaml_text(
        "", [*BASE, "tokenizer_path=~/model", "valid_dataset.path=./train.jsonl", "rollout.path=model"]
    )
    resolved = resolve_paths(config)
    assert resolved.actor.path == resolved.rollout.path == resolved.tokenizer_path == str(folder / "model")
    assert resolved.train_dataset.path == resolved.valid_dataset.path == str(folder / "train.jsonl")
    assert resolved.cluster.fileroot == str(folder / "runs")
    assert config.actor.path == "model"
    assert resolve_paths(resolved) == resolved


def test_generated_data_needs_no_path(folder: Path) -> None:
    config = from_yaml_text("", ["actor.path=model", "train_dataset.type=reasoning_gym", "train_dataset.path=model"])
    assert resolve_paths(config).train_dataset.path == "model"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda m: (m / "config.json").unlink(), "lacks config.json"),
        (lambda m: (m / "config.json").write_text("{"), "lacks a readable config.json"),
        (lambda m: (m / "model.safetensors").unlink(), "lacks weights (one of model.safetensors"),
        (lambda m: (m / "tokenizer.json").unlink(), "lacks a tokenizer (one of tokenizer.json"),
        (lambda m: dangle(m / "model.safetensors"), "lacks model.safetensors (a symbolic link to nothing)"),
        (lambda m: shard(m, ["a.safetensors"], []), "lacks a.safetensors"),
        (lambda m: shard(m, ["a.bin", "b.bin", "c.bin"], ["b.bin"]), "lacks a.bin and 1 more of its 3 shards"),
    ],
)
def test_an_incomplete_model_names_the_missing_file(folder: Path, broken, words: str) -> None:
    broken(folder / "model")
    (line,) = problems()
    assert words in line
    assert str(folder / "model") in line


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("no-such-blob"))


def shard(model: Path, named: list[str], present: list[str]) -> None:
    (model / "model.safetensors").unlink()
    index = {"weight_map": {f"layer.{number}": name for number, name in enumerate(named)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in present:
        (model / name).write_bytes(b"")


def make_cached(cache: Path, repository: str, kind: str = "models") -> Path:
    root = cache / f"{kind}--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / ("c" * 40)
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("c" * 40)
    snapshot.parent.mkdir()
    return snapshot


def test_a_repository_id_becomes_its_snapshot_in_the_local_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    snapshot = make_cached(folder / "hub", "org/Model-1.5B")
    make_model(snapshot)
    data = make_cached(folder / "hub", "openai/gsm8k", "datasets")
    data.mkdir()
    start = time.monotonic()
    config = from_yaml_text("", [*BASE, "actor.path=org/Model-1.5B", "train_dataset.path=openai/gsm8k"])
    resolved = resolve_paths(config)
    assert resolved.actor.path == str(snapshot)
    assert resolved.train_dataset.path == str(data)
    dangle(snapshot / "model.safetensors")
    with pytest.raises(ConfigError, match=r"actor\.path: 'org/Model-1.5B' lacks model\.safetensors"):
        resolve_paths(config)
    (absent,) = problems("actor.path=org/other")
    assert "'org/other' is no local path and not in the local Hugging Face cache" in absent
    assert str(folder / "hub") in absent
    assert time.monotonic() - start < 60


def test_paths_that_are_no_repository_ids_are_plainly_missing(folder: Path) -> None:
    for path in ("./absent", "a/b/c", os.fspath(folder / "absent")):
        assert problems(f"actor.path={path}") == [
            f"actor.path: {path!r} does not exist; allowed: an existing local path"
        ]
    assert "is not a folder" in problems("actor.path=train.jsonl")[0]
    assert problems("actor.path=")[0].startswith("actor.path: is not set; allowed: a local path")


def test_a_lease_is_longer_than_the_looks_that_keep_it(folder: Path) -> None:
    slow = ("rollout_array.poll_seconds=5", "rollout_array.lease_seconds=30")
    (text,) = problems("rollout_array.enabled=true", *slow)
    assert text == (
        "rollout_array.poll_seconds: 5.0 is not allowed; allowed: <= 3.75 (rollout_array.lease_seconds, 30, / 8)"
    )
    assert checked(*slow) == [], "nobody attaches"
    (text,) = problems("rollout_array.enabled=true", "rollout_array.orphan_seconds=20")
    assert text.startswith("rollout_array.orphan_seconds: 20.0 would end worlds")
