"""From raw rewards to what is normalised: bias, scaling, clip (in this order), per sequence."""

from __future__ import annotations

import numpy as np

from pekoe.pipeline.records import Float64


def shape_rewards(rewards: Float64, bias: float = 0.0, scaling: float = 1.0, clip: float = 20.0) -> Float64:
    """`clip((r + bias) * scaling, -clip, clip)` [S] in float64."""
    if not clip > 0:
        raise ValueError(f"reward_clip: {clip} is not allowed; must be > 0")
    return np.clip((np.asarray(rewards, dtype=np.float64) + bias) * scaling, -clip, clip)
