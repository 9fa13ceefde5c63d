"""Whole training steps on one and on two gloo ranks: the same figures, advantages and weights, a group split or not."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_worlds import run_world, write_models

pytestmark = pytest.mark.trainers

SCRIPT = Path(__file__).with_name("step_world.py")
SCENARIOS = {2: ["steps", "nothing", "save"], 1: ["steps", "nothing", "save", "load"]}


def load_script():
    spec = importlib.util.spec_from_file_location("step_world", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


world = load_script()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(scenario, ranks) -> what rank 0 found."""
    folder = tmp_path_factory.mktemp("steps")
    write_models(folder)
    for size in (2, 1):
        run_world(SCRIPT, folder, size, SCENARIOS[size])
    return {
        (name, size): torch.load(folder / f"{name}-{size}.pt", weights_only=False)
        for size, names in SCENARIOS.items()
        for name in names
    }


def assert_same(one, two):
    """Of two worlds: figures, advantages, returns and weights."""
    assert one["figures"][0].keys() == two["figures"][0].keys()
    for figures in (*one["figures"], *two["figures"]):
        assert all(math.isfinite(value) for value in figures.values())
        for name, value in figures.items():
            assert value == pytest.approx(one["figures"][0][name], rel=1e-9, abs=1e-11), name
    assert one["values"].keys() == two["values"].keys()
    for key, values in one["values"].items():
        for name, expected in values.items():
            found = two["values"][key][name]
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7, err_msg=f"{key} {name}")
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, rtol=1e-9, atol=1e-10, msg=str(name))


@pytest.mark.parametrize(
    ("algorithm", "version"), [("grpo", 4), ("grpo", 5), ("m2po", 4), ("m2po", 5), ("ppo", 3), ("ppo", 4), ("ppo", 5)]
)
def test_a_step_is_the_same_on_one_and_on_two_ranks(results, algorithm, version):
    one, two = (results["steps", size][algorithm, version] for size in (1, 2))
    split = set(two["groups"][0]) & set(two["groups"][1])
    assert split, "no group lies on both ranks"
    assert_same(one, two)


def test_every_algorithm_tells_the_same_names(results):
    """What only a critic, a reference or a method has is apart."""
    names = {key[0]: set(found["figures"][0]) for key, found in results["steps", 1].items() if key[1] == world.VERSION}
    own = ("critic/", "train/kl_ref", "reward/kl", "train/m2_dropped", "train/value")
    common = {key: {name for name in found if not name.startswith(own)} for key, found in names.items()}
    assert common["grpo"] == common["m2po"] == common["ppo"]
    assert {
        "reward/raw", "reward/shaped", "advantage/mean", "advantage/std", "train/ratio", "train/clipped_lower",
        "train/clipped_higher", "train/dual_clipped", "train/kl_behaviour", "train/entropy", "train/behaviour_weight",
        "train/rejected", "staleness/share_0", "staleness/share_8_up", "train/grad_norm", "train/logprob_gap",
        "engine_gap/mean", "groups/zero_variance",
    } <= common["grpo"]  # fmt: skip
    assert {"train/kl_ref", "reward/kl", "critic/loss", "critic/explained_variance", "critic/grad_norm"} <= names["ppo"]


def test_counts_are_of_the_batch_and_not_of_its_passes(results):
    made = [one for _, one in world.rows()]
    figures = results["steps", 2]["grpo", world.VERSION]["figures"][0]
    kept = [one for one in made if not one.truncated]
    assert figures["train/tokens"] == sum(int(one.loss_mask.sum()) for one in kept)
    assert figures["train/sequences"] == len(kept)
    assert figures["train/updates"] == 4
    ages = np.concatenate([world.VERSION - one.versions[one.loss_mask == 1] for one in kept])
    for age in range(4):
        assert figures[f"staleness/share_{age}"] == pytest.approx(np.mean(ages == age))
    assert figures["engine_gap/tokens"] == (ages == 0).sum(), "of the first pass only"
    loglinear = results["steps", 2]["m2po", world.VERSION]["figures"][0]
    fresh = sum(int((one.versions == world.VERSION).sum()) for one in made)
    assert 0 < loglinear["engine_gap/tokens"] < fresh, "of the first minibatch only"


def test_advantages_are_of_whole_groups(results):
    """Against numpy: mean and std over a true group, wherever its rows lie."""
    found = results["steps", 2]["m2po", world.VERSION]["values"]
    made = {(number, one.sample): one for number, one in world.rows()}
    mean = np.mean([one.reward for one in made.values()])
    for key, one in made.items():
        active = one.loss_mask == 1
        np.testing.assert_allclose(found[key]["advantages"][active], one.reward - mean, rtol=1e-6)
        assert not found[key]["advantages"][~active].any()


def test_the_critic_warms_up_alone(results):
    for size in (1, 2):
        found = results["steps", size]
        assert found["kept"], "the actor moved while the critic warmed up"
        figures = found["ppo", world.VERSION - 1]["figures"][0]
        assert figures["train/updates"] == 0
        assert figures["critic/updates"] == 6
        assert "train/loss" not in figures
        assert "advantage/mean" in figures
        assert found["ppo", world.VERSION]["figures"][0]["train/updates"] == 2
    before, after = (results["steps", 1]["ppo", version] for version in (world.VERSION - 1, world.VERSION + 1))
    assert after["figures"][0]["critic/loss"] < before["figures"][0]["critic/loss"]


def test_a_step_with_nothing_to_train_is_no_update_and_no_nan(results):
    for size in (1, 2):
        found = results["nothing", size]
        assert found["same"]
        for ranks in found["figures"]:
            assert ranks == [{"train/updates": 0, "critic/updates": 0}] * size
        assert found["next"]["figures"][0]["train/updates"] == 2
    assert_same(results["nothing", 1]["next"], results["nothing", 2]["next"])


def test_actor_and_critic_go_on_from_a_save_on_another_number_of_ranks(results):
    assert_same(results["save", 2], results["load", 1])
    assert_same(results["save", 1], results["load", 1])
