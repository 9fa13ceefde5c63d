"""A whole run with prefix sharing is the run without it, but for rounding, and says what it saves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import base_overrides, run

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(200)]


def test_a_run_with_prefix_sharing_learns_the_same(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    """With a reference and a critic, minibatches, and a budget that only shared prompts keep to one micro-batch."""
    common: dict[str, Any] = {
        "rollout.max_head_offpolicyness": 0, "rollout.deterministic": True, "total_train_steps": 2, "ref": "{}",
        "ref.dtype": "float32", "actor.kl_loss_coef": 0.1, "actor.ppo_n_minibatches": 2, "critic": "{}",
        "critic.dtype": "float32", "critic.optimizer.lr": 1e-3, "actor.optimizer.lr": 1e-4, "algorithm": "ppo",
    }  # fmt: skip
    outcomes = {}
    for share in (False, True):
        name = "shared" if share else "plain"
        overrides = {**base_overrides(tmp_path, tiny_model, sums, name), **common, "actor.enable_tree_training": share}
        outcomes[share] = run(tmp_path, overrides)
        assert outcomes[share].code == 0, outcomes[share].text
    for plain, shared in zip(outcomes[False].steps, outcomes[True].steps, strict=True):
        for figure in ("train/loss", "train/grad_norm", "train/entropy", "critic/grad_norm", "engine_gap/mean"):
            np.testing.assert_allclose(shared[figure], plain[figure], rtol=2e-3, atol=1e-6, err_msg=figure)
        assert shared["train/tokens"] == plain["train/tokens"]
        assert 1.2 < shared["train/tree_token_saving"] < 4
        assert 1.05 < shared["train/tree_flop_saving"] < 4
        assert not any("tree" in figure for figure in plain)
