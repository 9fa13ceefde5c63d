"""Which keys make a world sample in another way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.leases.config_hash import config_hash


def changed(key: str, value: Any) -> RunConfig:
    """A default configuration but for one key."""
    config = RunConfig()
    *sections, name = key.split(".")
    owner: Any = config
    for section in sections:
        owner = getattr(owner, section)
    assert getattr(owner, name) != value
    setattr(owner, name, value)
    return config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 7), ("tokenizer_path", "/t"), ("actor.path", "/m"), ("rollout.path", "/m"),
        ("rollout.dtype", "float16"), ("rollout.deterministic", True), ("gconfig.n_samples", 3),
        ("gconfig.temperature", 0.5), ("gconfig.stop", ["x"]), ("workflow.name", "multi_turn"),
        ("workflow.args", {"turns": 2}), ("reward.name", "gsm8k"), ("reward.args", {"a": 1}),
        ("reward.timeout_seconds", 1.0), ("reward.error_value", None), ("train_dataset.path", "/d"),
        ("train_dataset.size", 5), ("train_dataset.prompt_template", "{question}!"), ("train_dataset.max_length", 9),
    ],
)  # fmt: skip
def test_what_sampling_depends_on(key: str, value: Any) -> None:
    assert config_hash(changed(key, value)) != config_hash(RunConfig())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.n_nodes", 9), ("allocation", "hf:d4"), ("rollout.backend", "hf:d2"), ("rollout.max_slots", 3),
        ("reward.processes", 9), ("train_dataset.batch_size", 3), ("train_dataset.shuffle", False),
        ("rollout.max_head_offpolicyness", 5), ("trial_name", "again"), ("total_train_steps", 3),
    ],
)  # fmt: skip
def test_what_may_differ_from_world_to_world_or_is_the_heads_alone(key: str, value: Any) -> None:
    assert config_hash(changed(key, value)) == config_hash(RunConfig())


def test_an_absent_tokenizer_is_the_actors() -> None:
    config = changed("actor.path", "/m")
    assert config_hash(config) == config_hash(replace(config, tokenizer_path="/m"))
    assert len(config_hash(config)) == 32
