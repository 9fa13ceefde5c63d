"""Which groups dynamic sampling drops: those from whose rewards nothing is learned, for nobody did better or worse."""

from __future__ import annotations

import numpy as np

from pekoe.pipeline.records import TURN_REWARDS, Group, Trajectory


def has_equal_rewards(group: Group) -> bool:
    """Whether all sequences have earned the same, turn by turn; never so for a single episode."""
    first = group.trajectories[0]
    is_alone = all(t.sample == first.sample for t in group.trajectories)
    return not is_alone and all(earned(t) == earned(first) for t in group.trajectories)


def earned(trajectory: Trajectory) -> tuple[float, list[float]]:
    """The outcome's reward, and those of its turns."""
    turn_rewards = trajectory.extra.get(TURN_REWARDS)
    if turn_rewards is None:
        return trajectory.reward, []
    active = trajectory.loss_mask != 0
    is_last = np.append(np.diff(trajectory.turns[active]) != 0, True)
    return trajectory.reward, turn_rewards[active][is_last].tolist()
