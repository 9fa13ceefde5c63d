"""Which groups dynamic sampling drops."""

from __future__ import annotations

import numpy as np
import pytest

from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.rollout.equal_rewards import has_equal_rewards


def rewarded(sample: int, reward: float, *of_turns: float) -> Trajectory:
    """Two turns of two tokens; the first of them has `sample` tokens before it, so that places differ."""
    before = 1 + sample
    turns = np.array([-1] * before + [0, 0, -1, 1, 1], np.int32)
    active = turns >= 0
    extra = {}
    if of_turns:
        extra["turn_rewards"] = np.array([0] * before + [0, of_turns[0], 0, 0, of_turns[1]], np.float32)
    made = Trajectory(
        tokens=np.arange(len(turns), dtype=np.int32), loss_mask=active.astype(np.uint8),
        logprobs=np.where(active, -0.5, 0).astype(np.float32), versions=np.where(active, 0, -1).astype(np.int32),
        turns=turns, prompt_length=before, reward=reward, finish=Finish.STOP, sample=sample, extra=extra,
    )  # fmt: skip
    made.check()
    return made


@pytest.mark.parametrize(
    ("trajectories", "is_equal"),
    [
        ([rewarded(0, 1.0), rewarded(1, 1.0)], True),
        ([rewarded(0, 1.0), rewarded(1, 0.0)], False),
        ([rewarded(0, 0.0, 0.0, 1.0), rewarded(1, 0.0, 0.0, 1.0)], True),
        ([rewarded(0, 0.0, 1.0, 0.0), rewarded(1, 0.0, 0.0, 1.0)], False),
        ([rewarded(0, 0.0, 0.5, 0.5), rewarded(1, 1.0)], False),
        ([rewarded(0, 1.0)], False),
        ([rewarded(0, 1.0), rewarded(0, 1.0)], False),
        ([rewarded(0, 1.0), rewarded(0, 1.0), rewarded(1, 1.0)], True),
    ],
    ids=[
        "equal", "different", "equal turns", "other turns", "turns and outcome", "alone", "one episode", "two episodes",
    ],
)  # fmt: skip
def test_what_equal_rewards_are(trajectories: list[Trajectory], is_equal: bool) -> None:
    assert has_equal_rewards(Group(1, 0, "x", trajectories)) is is_equal
