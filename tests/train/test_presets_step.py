"""Every preset makes a step: on rows that several versions have sampled, and on rows of the step's own version."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from trainer_worlds import run_world, write_models

from pekoe.pipeline.config.load import preset_names

pytestmark = pytest.mark.trainers

SCRIPT = Path(__file__).with_name("presets_world.py")


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """(preset, form) -> what the step told."""
    folder = tmp_path_factory.mktemp("presets")
    write_models(folder)
    run_world(SCRIPT, folder, 1, ["presets"])
    return torch.load(folder / "presets-1.pt", weights_only=False)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_trains_in_both_forms(name, steps):
    for form in ("lagged", "fresh"):
        step = steps[name, form]
        assert all(math.isfinite(value) for value in step["figures"].values()), (form, step["figures"])
        assert step["moved"] > 1e-6, form
        assert step["figures"]["train/update_skipped"] == 0


@pytest.mark.parametrize("name", preset_names())
def test_on_its_own_samples_a_preset_clips_and_weighs_nothing(name, steps):
    """Synchronous: behaviour, proximal and current policy are one, so every objective is the plain policy gradient."""
    figures = steps[name, "fresh"]["figures"]
    assert figures["train/ratio"] == pytest.approx(1, abs=1e-6)
    assert figures["train/behaviour_weight"] == pytest.approx(1, abs=1e-6)
    assert figures["train/rejected"] == 0
    assert figures["train/staleness_max"] == 0
    assert {value for key, value in figures.items() if "clipped" in key} == {0}
    lagged = steps[name, "lagged"]["figures"]
    assert lagged["train/staleness_max"] > 0


def test_presets_differ_where_samples_are_stale(steps):
    """No two presets make the same step on lagged rows, but for those that differ in what this batch does not show."""
    norms = {name: round(steps[name, "lagged"]["figures"]["train/grad_norm"], 9) for name in preset_names()}
    assert len(set(norms.values())) >= 12, norms
