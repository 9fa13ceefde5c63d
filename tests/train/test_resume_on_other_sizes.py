"""A run with a critic that is killed goes on with another number of trainer ranks: same groups, losses, rates and
weights of both models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runs"))

from run_command import Outcome, base_overrides, environment, run
from test_death import heartbeats, start, wait_for_step

from pekoe.pipeline.complete_folder import verify

pytestmark = pytest.mark.trainers

STEPS, WARM_UP = 12, 2
ALLOCATIONS = {1: "hf:d1+fsdp:d1", 2: "hf:d1+fsdp:d2"}
SYNCHRONOUS = {
    "rollout.max_head_offpolicyness": 0, "rollout.deterministic": "true", "total_train_steps": STEPS,
    "total_train_epochs": 2, "recover.freq_steps": 4, "actor.optimizer.warmup_steps_proportion": 0.5,
    "actor.optimizer.lr_scheduler_type": "cosine", "seed": 5,
    "algorithm": "ppo", "actor.ppo_n_minibatches": 2, "critic.dtype": "float32", "critic.optimizer.lr": 1e-2,
    "critic.optimizer.lr_scheduler_type": "linear", "critic.warmup_steps": WARM_UP, "critic.ppo_epochs": 2,
}  # fmt: skip
COMPARED = {
    "train/lr": 0.0, "train/loss": 1e-4, "train/grad_norm": 1e-3, "critic/lr": 0.0, "critic/loss": 1e-4,
    "critic/grad_norm": 1e-3, "critic/value": 1e-4, "advantage/std": 1e-4,
}  # fmt: skip
"""Figures of each step, with how far they may be off on another number of ranks."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, sums: Path) -> Outcome:
    root = tmp_path_factory.mktemp("whole")
    outcome = run(root, {**base_overrides(root, tiny_model, sums, "whole"), **SYNCHRONOUS})
    assert outcome.code == 0, outcome.text
    return outcome


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_nothing_is_lost_and_the_numbers_are_the_same(
    uninterrupted: Outcome, before: int, after: int, tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "killed"), **SYNCHRONOUS, "allocation": ALLOCATIONS[before],
    }  # fmt: skip
    path = tmp_path / "test" / "killed"
    process = start(tmp_path, overrides)
    wait_for_step(path, 5, process)
    os.kill(int(heartbeats(path)[0]["pid"]), signal.SIGKILL)
    assert process.wait(timeout=60) not in (0, 75)
    resumed = subprocess.run(
        [sys.executable, "-m", "pekoe.launch.cli", "run", "--resume", str(path), f"allocation={ALLOCATIONS[after]}"],
        env=environment(), timeout=240, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    outcome = Outcome(resumed.returncode, resumed.stdout, path)
    assert outcome.code == 0, outcome.text[-3000:]
    attempts = [line["attempt"] for line in with_figure(outcome, "critic/loss")]
    assert attempts == sorted(attempts)
    assert attempts.count(0) in (4, 8), "it went on from a checkpoint"
    assert outcome.consumed() == uninterrupted.consumed()
    for name, tolerance in COMPARED.items():
        found, expected = ([line[name] for line in with_figure(one, name)] for one in (outcome, uninterrupted))
        assert len(found) == STEPS - WARM_UP * name.startswith("train/")
        np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance, err_msg=name)
    weights, expected = (
        load_file(one.run / "exports" / f"step-{STEPS}" / "model.safetensors") for one in (outcome, uninterrupted)
    )
    for name, tensor in expected.items():
        np.testing.assert_allclose(weights[name].numpy(), tensor.numpy(), atol=2e-4, err_msg=name)
    last = verify(path / "checkpoints" / f"step-{STEPS}", deep=True)
    assert (last["step"], last["attempt"], last["world_size"]) == (STEPS, 1, after)
    assert {file["name"].split("/")[0] for file in last["files"] if "/" in file["name"]} == {"engine", "critic"}
    states = {file["name"] for file in last["files"] if file["name"].startswith("rng-")}
    assert states == {f"rng-{rank}.msgpack" for rank in range(after)}


def with_figure(outcome: Outcome, name: str) -> list[dict[str, Any]]:
    """Steps that tell it: what is of the actor's updates is absent while the critic warms up."""
    return [line for line in outcome.metrics if name in line]
