"""One rank that makes a step with every preset, on lagged rows and on rows of its own version.

usage: presets_world.py FOLDER RANK SIZE presets      as `fsdp_world.py`
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import fsdp_world as world  # noqa: E402
from step_world import VERSION, StepRank, rows  # noqa: E402

from pekoe.pipeline.config.load import from_yaml_text, preset_names  # noqa: E402
from pekoe.pipeline.config.run import RunConfig  # noqa: E402
from pekoe.pipeline.records import pack  # noqa: E402

RECIPE = """
actor: {path: MODEL, dtype: float64, mb_spec: {max_tokens_per_mb: 24}, optimizer: {lr: 1.0e-3}}
gconfig: {max_new_tokens: 12, n_samples: 4}
rollout: {dtype: float64}
"""


def configuration(folder: Path, name: str) -> RunConfig:
    """The recipe under a preset; the models beside the policy in float64, too."""
    text = RECIPE.replace("MODEL", str(folder / "qwen3"))
    config = from_yaml_text(text, [f"algorithm={name}"])
    for beside in (config.critic, config.ref):
        if beside is not None:
            beside.dtype = "float64"
    return config


def fresh(made, engine):
    """The rows as if the weights that are now there had sampled them."""
    (logprobs,) = engine.forward([pack(made)], world.TEMPERATURE)
    ends = np.cumsum([len(one.tokens) for _, one in made])
    parts = np.split(logprobs.numpy(), ends[:-1])
    return [
        (
            number,
            dataclasses.replace(
                one,
                logprobs=part.astype(np.float32),
                versions=np.where(one.loss_mask == 1, VERSION, -1).astype(np.int32),
            ),
        )
        for (number, one), part in zip(made, parts, strict=True)
    ]


def scenario_presets(folder, rank, size):
    """(preset, form) -> figures of one step from the same weights, and how far the weights moved."""
    found = {}
    for name in preset_names():
        for form in ("lagged", "fresh"):
            made = StepRank(folder, rank, size, configuration(folder, name))
            before = world.weights(made.engine)
            batch = rows() if form == "lagged" else fresh(rows(), made.engine)
            figures, _ = made.run(batch)
            after = world.weights(made.engine)
            moved = max(float((after[part] - before[part]).abs().max()) for part in before)
            found[name, form] = {"figures": figures, "moved": moved}
            made.close()
    return found


if __name__ == "__main__":
    world.__dict__["scenario_presets"] = scenario_presets
    world.run_as_program()
