"""Whole runs in which engine and trainer must agree: frozen weights keep the ratio at 1; other weights are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import base_overrides, run
from tiny_model import write_tiny_model

pytestmark = pytest.mark.trainers


def test_frozen_weights_keep_the_ratio_at_one_under_cuts_and_penalties(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    frozen = {
        "actor.optimizer.lr": 0, "rollout.max_head_offpolicyness": 0, "rollout.stop_at_gap": "true",
        "actor.ppo_n_minibatches": 2, "gconfig.temperature": 0.6, "gconfig.top_p": 0.8,
        "gconfig.frequency_penalty": 0.5, "gconfig.logit_bias": "{5: 2, 6: -100}",
    }  # fmt: skip
    outcome = run(tmp_path, {**base_overrides(tmp_path, tiny_model, sums, "frozen"), **frozen})
    assert outcome.code == 0, outcome.text
    assert len(outcome.steps) == 4
    for line in outcome.steps:
        assert line["train/ratio"] == pytest.approx(1, abs=1e-5)
        assert line["train/behaviour_weight"] == pytest.approx(1, abs=1e-5)
        assert line["engine_gap/tokens"] == line["train/tokens"]
        assert line["engine_gap/max"] < 1e-4
        assert line["engine_gap/share_above_0.1"] == line["weights/logprob_gap_share_above_0.1"] == 0
        assert line["weights/logprob_gap_max"] < 1e-4
    log = (outcome.run / "logs" / "0" / "rank-0.log").read_text()
    assert "hf engine (rollout.dtype float32) and fsdp trainer (actor.dtype float32) on cpu agree at version 0" in log


def test_an_engine_with_other_weights_is_refused_before_anything_is_sampled(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    overrides = base_overrides(tmp_path, tiny_model, sums, "other")
    outcome = run(tmp_path, {**overrides, "rollout.path": other})
    assert outcome.code == 1
    assert "disagree at version 0 (rank 1)" in outcome.text
    assert "rollout.logprob_gap_limit 0.001" in outcome.text
    assert not outcome.steps
    assert not list((outcome.run / "shards").rglob("*.h5"))
