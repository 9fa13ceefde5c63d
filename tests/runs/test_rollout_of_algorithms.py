"""Whole runs with what the algorithm family asks of the rollout side: dynamic sampling, turns, a teacher on engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import Outcome, base_overrides, run
from tiny_model import write_tiny_model

from pekoe.pipeline.records import Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.shard import Shard
from pekoe.pipeline.trajectory.store import Store

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(200)]
SYNCHRONOUS: dict[str, Any] = {"rollout.max_head_offpolicyness": 0, "rollout.deterministic": True}


def trajectories(outcome: Outcome) -> dict[tuple[int, int], Trajectory]:
    """By group and sample; all that lies in the shards."""
    directory = RunDirectory(outcome.run)
    found = {}
    for name in Store(directory).paths():
        with Shard(directory.path / name) as shard:
            for group, trajectory in shard.read(range(shard.num_rows)):
                found[group, trajectory.sample] = trajectory
    return found


def test_groups_with_equal_rewards_are_dropped_and_replaced(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    """The share of digits among one token is 0 or 1: pairs are often equal."""
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "dynamic"), "rollout.dynamic_sampling": True,
        "gconfig.n_samples": 2, "gconfig.max_new_tokens": 1, "total_train_steps": 3, "total_train_epochs": 4,
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text
    assert [len(groups) for groups in outcome.consumed()] == [4, 4, 4]
    filtered = [entry for record in outcome.ledger for entry in record["filtered"]]
    assert filtered
    assert {entry[4] for entry in filtered} == {"equal_rewards"}
    assert not {entry[0] for entry in filtered} & {group for groups in outcome.consumed() for group in groups}
    assert {step["groups/zero_variance"] for step in outcome.steps} == {0.0}
    rewards: dict[int, set[float]] = {}
    for (group, _), trajectory in trajectories(outcome).items():
        rewards.setdefault(group, set()).add(trajectory.reward)
    assert all(len(found) == 2 for found in rewards.values()), "a dropped group is in no shard"


@pytest.mark.slow
def test_a_constant_reward_makes_smaller_batches_until_nothing_is_left(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "shrinks"), "rollout.dynamic_sampling": True,
        "rollout.dynamic_batch_size": True, "reward.name": "zero", "total_train_steps": 3,
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text
    assert outcome.consumed() == [[], [], []]
    assert sum(len(record["filtered"]) for record in outcome.ledger) >= 12


def test_turns_reach_the_trainer_with_their_rewards(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "turns"), "workflow.name": "multi_turn",
        "workflow.args.max_turns": 3, "workflow.args.per_turn_rewards": True, "workflow.args.feedback": "1-1=",
        "workflow.args.right_above": 0.9, "gconfig.max_new_tokens": 4, "actor.gae_unit": "turn",
        "actor.reward_norm": "null", "total_train_steps": 2,
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text
    assert len(outcome.steps) == 2
    found = trajectories(outcome)
    assert max(int(one.turns.max()) for one in found.values()) == 2
    for one in found.values():
        assert one.reward == 0.0
        sampled = one.loss_mask != 0
        assert not one.extra["turn_rewards"][~sampled].any()
        assert one.total_reward == pytest.approx(sum(one.info["turn_rewards"]), abs=1e-5)
    assert all(step["train/grad_norm"] > 0 for step in outcome.steps)


def test_a_teacher_on_the_engine_teaches_what_one_on_the_trainer_does(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    teacher = write_tiny_model(tmp_path / "teacher", seed=3)
    common = {
        "task": "distill", "teacher.path": teacher, "teacher.dtype": "float32", "reward.name": "zero",
        "total_train_steps": 3, **SYNCHRONOUS,
    }  # fmt: skip
    outcomes = {}
    for place in ("engine", "trainer"):
        overrides = {**base_overrides(tmp_path, tiny_model, sums, place), **common, "teacher.place": place}
        outcomes[place] = run(tmp_path, overrides)
        assert outcomes[place].code == 0, outcomes[place].text
    rows = trajectories(outcomes["engine"])
    assert all(one.extra["teacher_logprobs"][one.loss_mask != 0].all() for one in rows.values())
    assert all(not one.extra for one in trajectories(outcomes["trainer"]).values())
    for own, other in zip(outcomes["engine"].steps, outcomes["trainer"].steps, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            np.testing.assert_allclose(own[name], other[name], rtol=2e-4, atol=1e-6)
