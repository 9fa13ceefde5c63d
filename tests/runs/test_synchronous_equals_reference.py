"""eta = 0, deterministic: trajectories, losses and weights of a real world equal the one-process reference."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import base_overrides, run
from synchronous_reference import run_reference

from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.shard import Shard

STEPS, BATCH, SAMPLES = 3, 4, 4


@pytest.mark.timeout(400)
@pytest.mark.trainers
def test_synchronous_world_equals_the_reference_and_itself(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "first"), "rollout.max_head_offpolicyness": 0,
        "rollout.deterministic": "true", "total_train_steps": STEPS, "gconfig.temperature": 0.9, "seed": 5,
    }  # fmt: skip
    first = run(tmp_path, overrides)
    assert first.code == 0, first.text
    expected = run_reference(
        tiny_model,
        sums,
        seed=5,
        steps=STEPS,
        batch=BATCH,
        n_samples=SAMPLES,
        max_new_tokens=8,
        temperature=0.9,
        lr=1e-3,
    )
    found = trajectories(first.run)
    assert found.keys() == expected.completions.keys()
    for key, trajectory in found.items():
        reference = expected.completions[key]
        sampled = trajectory.loss_mask.astype(bool)
        assert trajectory.tokens[sampled].tolist() == reference.tokens
        assert trajectory.tokens[~sampled].tolist() == reference.prompt
        np.testing.assert_allclose(trajectory.logprobs[sampled], reference.logprobs, atol=2e-5)
        assert trajectory.reward == pytest.approx(reference.reward)
        assert set(trajectory.versions[sampled]) == {(key[0] & 0xFFFF) // BATCH}
    np.testing.assert_allclose([line["train/loss"] for line in first.steps], expected.losses, atol=1e-5)
    exported = load_file(first.run / "exports" / f"step-{STEPS}" / "model.safetensors")
    for name, tensor in exported.items():
        np.testing.assert_allclose(tensor.numpy(), expected.weights[name].numpy(), atol=2e-4, err_msg=name)

    second = run(tmp_path, {**overrides, "trial_name": "second"})
    assert second.code == 0, second.text
    again = trajectories(second.run)
    assert all(np.array_equal(found[key].tokens, again[key].tokens) for key in found)
    assert all(np.array_equal(found[key].logprobs, again[key].logprobs) for key in found)
    assert fingerprint(first.run) == fingerprint(second.run)


def trajectories(run_path: Path) -> dict[tuple[int, int], object]:
    run_directory = RunDirectory(run_path)
    found = {}
    for path in sorted(run_directory.shards.glob("*/*.h5")):
        with Shard(path) as shard:
            for group in shard.groups():
                for trajectory in group.trajectories:
                    assert (group.number, trajectory.sample) not in found
                    found[group.number, trajectory.sample] = trajectory
    return found


def fingerprint(run_path: Path) -> str:
    return hashlib.sha256((run_path / "exports" / f"step-{STEPS}" / "model.safetensors").read_bytes()).hexdigest()
