"""Statistics of a step's rewards and advantages, summed over data-parallel ranks: ratios of sums are the same on any
number of them.

    over reward_sequences    reward_raw, reward_shaped, reward_shaped_squares, overlong_penalty
    over advantage_tokens    advantage_sum, advantage_abs, advantage_squares (after normalisation), return_sum,
                             kl_reward_sum (with kl_ctl)
    turn_reward_sum          where a turn has one
    over advantage_tokens    return_squares, return_error, return_error_squares (return - value): explained variance is
                             1 - Var(error) / Var(return)                                        (with a critic)
    reward_groups            groups that train; zero_variance_groups: whose shaped rewards, of turns, too, are all equal
    maximum                  advantage_abs_max

Legend: M tokens of a rank laid end to end, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pekoe.pipeline.algorithm.normalise import RewardRows
from pekoe.pipeline.algorithm.reduction import Reduction
from pekoe.pipeline.algorithm.segments import segment_sum
from pekoe.pipeline.records import Float64

OPTIONAL = {
    "rewarded_turns": ("turn_reward_sum",),
    "kl_tokens": ("kl_reward_sum",),
    "value_targets": ("return_squares", "return_error", "return_error_squares"),
}
"""Counts, and the sums that are absent where the count is 0."""


@dataclass(frozen=True)
class StepFigures:
    """What a rank has of a step, in float64."""

    trains: npt.NDArray[np.bool_]  # [S]
    raw: Float64  # [S]
    shaped: Float64  # [S]
    penalty: Float64  # [S]
    mask: Tensor  # [M] bool
    turn_rewards: Tensor  # [M] scaled and clipped
    kl: Tensor | None  # [M] KL reward
    advantages: Tensor  # [M]
    returns: Tensor  # [M]
    values: Tensor | None  # [M]

    def sums(self, over: Reduction) -> dict[str, float]:
        """Over all ranks, with the maximum. Collective: two reductions, the same on every rank."""
        local = self._sequence_sums() | self._token_sums()
        total = over.sum(torch.tensor(list(local.values()), dtype=torch.float64)).tolist()
        found = dict(zip(local, total, strict=True))
        for count, names in OPTIONAL.items():
            if not found[count]:
                for name in names:
                    del found[name]
            del found[count]
        largest = over.max(torch.cat([torch.zeros(1), self.advantages[self.mask].abs()]).double().max())
        if found["advantage_tokens"]:
            found["advantage_abs_max"] = float(largest)
        return found

    def _sequence_sums(self) -> dict[str, float]:
        raw, shaped = self.raw[self.trains], self.shaped[self.trains]
        return {
            "reward_sequences": float(self.trains.sum()),
            "reward_raw": float(raw.sum()),
            "reward_shaped": float(shaped.sum()),
            "reward_shaped_squares": float(np.square(shaped).sum()),
            "overlong_penalty": float(self.penalty[self.trains].sum()),
        }

    def _token_sums(self) -> dict[str, float]:
        def active(values: Tensor | None) -> Tensor:
            return (torch.zeros_like(self.advantages) if values is None else values)[self.mask].double()

        advantages, returns, turns = active(self.advantages), active(self.returns), active(self.turn_rewards)
        error = torch.zeros_like(returns) if self.values is None else returns - active(self.values)
        num_tokens = float(self.mask.sum())
        return {
            "advantage_tokens": num_tokens,
            "advantage_sum": float(advantages.sum()),
            "advantage_abs": float(advantages.abs().sum()),
            "advantage_squares": float(advantages.square().sum()),
            "return_sum": float(returns.sum()),
            "rewarded_turns": float((turns != 0).sum()),
            "turn_reward_sum": float(turns.sum()),
            "kl_tokens": 0.0 if self.kl is None else num_tokens,
            "kl_reward_sum": float(active(self.kl).sum()),
            "value_targets": 0.0 if self.values is None else num_tokens,
            "return_squares": float(returns.square().sum()),
            "return_error": float(error.sum()),
            "return_error_squares": float(error.square().sum()),
        }


def turn_marks(turn_rewards: Tensor, turns: Tensor, index: Tensor, num_sequences: int) -> Float64:
    """[S] a number for what each sequence's turns have earned: equal where that is equal turn by turn.

    Cosines of whole numbers are linearly independent over the rationals: other rewards have other sums.
    """
    return segment_sum(turn_rewards * torch.cos(turns.double() + 1), index, num_sequences).numpy()


def group_statistics(rows: RewardRows, marks: Float64) -> dict[str, float]:
    """From all ranks' rows and `turn_marks` [S]: how many groups train, and in how many the shaped rewards are all
    equal, those of turns, too."""
    groups, earned = rows.groups[rows.keep], np.stack([rows.rewards, marks])[:, rows.keep]
    if not len(groups):
        return {"reward_groups": 0.0, "zero_variance_groups": 0.0}
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order[0]] - 1))
    lowest, highest = (bound.reduceat(earned[:, order], starts, axis=1) for bound in (np.minimum, np.maximum))
    return {
        "reward_groups": float(len(starts)),
        "zero_variance_groups": float((lowest == highest).all(axis=0).sum()),
    }
