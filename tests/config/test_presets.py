"""The sixteen algorithms: values of their papers, one replaces another entirely, and single keys win over any."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import DictConfig

from pekoe.pipeline.config.actor import ActorConfig, NormConfig, RejectionConfig
from pekoe.pipeline.config.check import check
from pekoe.pipeline.config.load import PRESETS, from_yaml_text, preset_names, read_preset, to_yaml
from pekoe.pipeline.config.run import RunConfig

BASE = ActorConfig(
    loss_aggregation="token_mean",
    eps_clip=0.2,
    use_decoupled_loss=True,
    rejection_sampling=RejectionConfig("token", "mask", "ratio", "mean", 5.0, None),
    reward_norm=NormConfig("group", "group"),
    adv_norm=None,
    discount=1.0,
    gae_lambda=1.0,
)
BATCH = NormConfig("batch", "batch")
DIFFERS: dict[str, dict[str, object]] = {
    "grpo": {},
    "grpo_original": {"loss_aggregation": "sequence_mean", "kl_loss_coef": 0.04, "kl_loss_estimator": "k3"},
    "drgrpo": {"loss_aggregation": "constant", "reward_norm": NormConfig("group", None)},
    "liteppo": {"reward_norm": NormConfig("group", "batch")},
    "rloo": {"reward_norm": NormConfig("group", None, mean_leave1out=True)},
    "reinforce_pp": {"reward_norm": None, "kl_ctl": 1e-3, "kl_estimator": "k1", "adv_norm": BATCH},
    "reinforce_baseline": {
        "reward_norm": NormConfig("group", None),
        "kl_loss_coef": 1e-3,
        "kl_loss_estimator": "k2",
        "kl_estimator": "k2",
        "adv_norm": BATCH,
    },
    "gspo": {
        "importance_sampling_level": "sequence",
        "loss_aggregation": "sequence_mean",
        "eps_clip": 3e-4,
        "eps_clip_higher": 4e-4,
    },
    "dapo": {"eps_clip_higher": 0.28, "overlong_reward_penalty": True, "overlong_tokens": 102},
    "ppo": {"reward_norm": None, "adv_norm": BATCH},
    "sapo": {"objective": "sapo", "eps_clip": None, "use_decoupled_loss": False, "rejection_sampling": None},
    "cispo": {"objective": "cispo", "eps_clip": 1.0, "eps_clip_higher": 4.0},
    "icepop": {"rejection_sampling": RejectionConfig("token", "mask", "ratio", "mean", 5.0, 0.5)},
    "kpop": {"rejection_sampling": RejectionConfig("token", "mask", "binary_kl", "mean", 2.0, None)},
    "m2po": {"m2_threshold": 0.04, "eps_clip": None},
    "prox_approx": {"prox_logp_method": "loglinear"},
}
"""What differs from the base; of a completion of 512 tokens the last 102 are DAPO's window."""
WITH_REFERENCE = {"grpo_original", "reinforce_pp", "reinforce_baseline"}
STALE = """
actor:
  path: models/policy
  optimizer: {lr: 3e-6}
  eps_clip: 0.7
  kl_ctl: 0.5
  m2_threshold: 0.1
  objective: cispo
  overlong_reward_penalty: true
  gae_lambda_by_length: vapo
  adv_norm: {mean_level: group}
ref: {path: models/reference, offload_params: true}
critic: {path: models/critic, optimizer: {lr: 9e-6}, warmup_steps: 5}
rollout: {dynamic_sampling: true, dynamic_batch_size: true, max_head_offpolicyness: 3}
"""
"""A recipe that says everything another way."""


def test_there_are_sixteen() -> None:
    assert preset_names() == sorted(DIFFERS)
    assert len(DIFFERS) == 16


@pytest.mark.parametrize("name", DIFFERS)
def test_a_preset_is_the_base_but_for_what_its_paper_changes(name: str) -> None:
    config = from_yaml_text("", [f"algorithm={name}"])
    differs = {key: value for key, value in vars(config.actor).items() if value != vars(BASE)[key]}
    assert differs == {key: value for key, value in DIFFERS[name].items() if value != vars(BASE)[key]}
    assert (config.ref is not None) == (name in WITH_REFERENCE)
    assert (config.critic is not None) == (name == "ppo")
    assert config.rollout.dynamic_sampling == (name == "dapo")
    assert not config.rollout.dynamic_batch_size


@pytest.mark.parametrize("name", DIFFERS)
def test_a_preset_names_its_paper(name: str) -> None:
    comment = "".join(re.findall(r"^#.*\n", (PRESETS / f"{name}.yaml").read_text(), re.M))
    assert re.search(r"arXiv:\d{4}\.\d{5}\)", comment), comment


def test_every_preset_states_every_key_that_any_states() -> None:
    trees = {name: read_preset(name) for name in preset_names()}
    every = {key for tree in trees.values() for key in _dotted(tree)}
    for name, tree in trees.items():
        stated, nulls = {*_dotted(tree), *_sections(tree)}, tuple(f"{key}." for key in _nulls(tree))
        assert {key for key in every - stated if not key.startswith(nulls)} == set(), name


def _dotted(section: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key, value in section.items():
        names += _dotted(value, f"{prefix}{key}.") if isinstance(value, DictConfig) else [f"{prefix}{key}"]
    return names


def _nulls(section: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key, value in section.items():
        if isinstance(value, DictConfig):
            names += _nulls(value, f"{prefix}{key}.")
        elif value is None:
            names.append(f"{prefix}{key}")
    return names


def _sections(section: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key, value in section.items():
        if isinstance(value, DictConfig):
            names += [f"{prefix}{key}", *_sections(value, f"{prefix}{key}.")]
    return names


def test_one_preset_replaces_another() -> None:
    whole = {name: from_yaml_text(f"algorithm: {name}") for name in preset_names()}
    names = preset_names()
    for distance in (1, 5, 11):
        for first, second in zip(names, [*names[distance:], *names[:distance]], strict=True):
            assert from_yaml_text(f"algorithm: {first}", [f"algorithm={second}"]) == whole[second], (first, second)


@pytest.mark.parametrize("name", DIFFERS)
def test_a_preset_over_any_recipe_is_that_algorithm_and_the_rest_is_the_recipes(name: str) -> None:
    config = from_yaml_text(STALE, [f"algorithm={name}"])
    plain = from_yaml_text(f"algorithm: {name}")
    own = ("path", "optimizer")
    for key, value in vars(plain.actor).items():
        if key not in own:
            assert vars(config.actor)[key] == value, key
    assert (config.actor.path, config.actor.optimizer.lr) == ("models/policy", 3e-6)
    assert config.rollout.max_head_offpolicyness == 3
    assert config.rollout.dynamic_sampling == plain.rollout.dynamic_sampling
    if name in WITH_REFERENCE:
        assert (config.ref.path, config.ref.offload_params) == ("models/reference", True)
    else:
        assert config.ref is None
    if name == "ppo":
        critic = config.critic
        assert (critic.path, critic.optimizer.lr, critic.warmup_steps) == ("models/critic", 9e-6, 5)
    else:
        assert config.critic is None
    assert from_yaml_text(to_yaml(config)) == config


def test_single_keys_win_over_a_preset_from_the_command_line() -> None:
    ppo = from_yaml_text("algorithm: grpo", ["critic.optimizer.lr=1e-5", "actor.eps_clip=0.1", "algorithm=ppo"])
    assert (ppo.critic.optimizer.lr, ppo.critic.path, ppo.actor.eps_clip) == (1e-5, "", 0.1)
    assert ppo.actor.reward_norm is None
    kept = from_yaml_text("critic: {path: c}", ["algorithm=ppo", "critic.optimizer.lr=1e-5"])
    assert (kept.critic.path, kept.critic.optimizer.lr) == ("c", 1e-5)
    grpo = from_yaml_text("algorithm: ppo", ["algorithm=grpo", "actor.kl_loss_coef=0.01", "ref={}"])
    assert (grpo.critic, grpo.ref.path, grpo.actor.kl_loss_coef) == (None, "", 0.01)
    null = from_yaml_text("algorithm: reinforce_pp", ["actor.kl_ctl=0", "ref=null"])
    assert null.ref is None
    bounds = from_yaml_text("algorithm: sapo", ["actor.rejection_sampling.upper=3"]).actor.rejection_sampling
    assert bounds == RejectionConfig(upper=3.0)


def test_keys_of_the_yaml_win_over_the_preset_that_it_names() -> None:
    config = from_yaml_text("algorithm: ppo\ncritic: {path: c}\nactor: {gae_lambda: 0.95, reward_norm: {eps: 1e-6}}")
    assert (config.critic.path, config.actor.gae_lambda) == ("c", 0.95)
    assert config.actor.reward_norm == NormConfig(eps=1e-6)
    assert from_yaml_text("algorithm: ppo\ncritic: null").critic is None


@pytest.mark.parametrize("staleness", ["0", "4", "null"])
@pytest.mark.parametrize("name", DIFFERS)
def test_every_preset_passes_the_checks_synchronous_and_asynchronous(
    tmp_path: Path, name: str, staleness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 1024}')
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / file).write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    config: RunConfig = from_yaml_text(
        "actor: {path: model}\ntrain_dataset: {path: train.jsonl}\ngconfig: {max_tokens: 1024}",
        [f"algorithm={name}", f"rollout.max_head_offpolicyness={staleness}"],
    )
    assert check(config) == []
