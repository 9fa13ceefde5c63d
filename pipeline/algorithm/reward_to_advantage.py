"""From the rewards of a step to the advantages of its tokens, in one pass on every trainer rank.

    reward ─► + model scores ─► overlong, bias, scaling, clip ─► normalised over true groups ─► last active token ─┐
    turn rewards ─► scaling, clip ─► last active token of the turn ───────────────────────────────────────────────┤
    log-probs, reference ─► -kl_ctl KL a token ───────────────────────────────────────────────(token unit) ───────┤
    advantages, returns ◄─ normalised over tokens ◄─ + KL reward (turn unit) ◄─ estimator (values, bootstrap) ◄───┘

All statistics are float64, over data-parallel ranks; groups may lie on several. What a rank gets does not depend on how
the step is cut into ranks and micro-batches. Legend: M tokens laid end to end, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pekoe.pipeline.algorithm.estimator_terms import Estimator, EstimatorTerms
from pekoe.pipeline.algorithm.kl import kl_reward
from pekoe.pipeline.algorithm.normalise import RewardRows, normalise_rewards, normalise_tokens
from pekoe.pipeline.algorithm.reduction import Reduction
from pekoe.pipeline.algorithm.reward_statistics import StepFigures, group_statistics, turn_marks
from pekoe.pipeline.algorithm.rewards import overlong_penalty, place_outcomes, place_turn_rewards, shape_rewards
from pekoe.pipeline.algorithm.segments import segment_sum, sequence_index
from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.records import Float64, Int64, PackedBatch
from pekoe.pipeline.registry import ADVANTAGE_ESTIMATORS, resolve

__all__ = ["Advantages", "Reduction", "add_advantages", "find_advantages"]


@dataclass(frozen=True)
class Advantages:
    """What `find_advantages` gives for a rank's tokens, end to end."""

    advantages: Tensor
    """[M] float64, 0 on tokens that do not train."""
    returns: Tensor
    """[M] float64: what values are trained towards."""
    sums: dict[str, float]
    """See `add_advantages`."""


def add_advantages(
    batches: Sequence[PackedBatch],
    config: ActorConfig,
    max_new_tokens: int,
    over: Reduction,
    *,
    groups: Sequence[int],
) -> dict[str, float]:
    """Puts `advantages` and `returns` [M] float32 into the extra of this rank's batches of a step. Collective.

    `groups` are all group numbers of the step, in any order, the same on all ranks. Reads of the extras, where they
    are: `model_scores` [S] (already weighted: added to the rewards as they are), `turn_rewards` [M] (on any token of
    their turn), `ref_logprobs`, `prox_logprobs` [M], `values` [M] with `bootstrap` [S] (read where a sequence is
    truncated). Raises ValueError naming what is missing for a key that is set.

    Returns sums over all ranks for metrics; maxima where the name ends in `_max`; what the run does not have (turn
    rewards, values, a KL reward) is absent. Over `reward_sequences`: reward_raw, reward_shaped (after overlong penalty,
    bias, scaling and clip) with its squares, overlong_penalty. Over `advantage_tokens`: advantage_sum,
    advantage_abs, advantage_squares. See `reward_statistics.py` for all.
    """
    found = find_advantages(batches, config, max_new_tokens, over, groups=groups)
    cuts = np.cumsum([batch.num_tokens for batch in batches])[:-1]
    for name, values in (("advantages", found.advantages), ("returns", found.returns)):
        parts = np.split(values.to(torch.float32).numpy(), cuts) if batches else []
        for batch, part in zip(batches, parts, strict=True):
            batch.extra[name] = part
    return found.sums


def find_advantages(
    batches: Sequence[PackedBatch],
    config: ActorConfig,
    max_new_tokens: int,
    over: Reduction,
    *,
    groups: Sequence[int],
) -> Advantages:
    """`add_advantages` in float64, leaving the batches alone."""
    rank = _RankRows.of(batches, config, groups)
    raw = rank.rewards + rank.column("model_scores", rank.zeros_of_sequences).numpy()
    penalty = overlong_penalty(rank.num_sampled, max_new_tokens, config)
    shaped = shape_rewards(raw + penalty, config.reward_bias, config.reward_scaling, config.reward_clip)
    own = RewardRows(shaped, rank.groups, rank.samples, rank.trains)
    turn_rewards = rank.turn_rewards(config)
    marks = turn_marks(turn_rewards, rank.turns, sequence_index(rank.cu_seqlens), len(own.keep))
    table = over.gather(np.stack([own.rewards, own.groups, own.samples, own.keep, marks], axis=1).astype(np.float64))
    voters = RewardRows(table[:, 0], table[:, 1].astype(np.int64), table[:, 2].astype(np.int64), table[:, 3] > 0)
    outcomes = torch.from_numpy(normalise_rewards(own, config.reward_norm, voters))
    kl = rank.kl_reward(config)
    rewards = place_outcomes(outcomes, rank.mask, rank.cu_seqlens) + turn_rewards
    is_token_unit = config.gae_unit == "token"
    values, bootstrap = rank.values_and_bootstrap()
    terms = EstimatorTerms(
        rewards=rewards + kl if is_token_unit else rewards, mask=rank.mask, turns=rank.turns,
        cu_seqlens=rank.cu_seqlens, values=values, bootstrap=bootstrap, groups=torch.from_numpy(rank.groups),
        num_groups=rank.num_groups, samples=torch.from_numpy(rank.samples), config=config, over=over,
    )  # fmt: skip
    estimator: Estimator = resolve(ADVANTAGE_ESTIMATORS, config.advantage_estimator, "actor.advantage_estimator")
    advantages, returns = estimator(terms)
    if not is_token_unit:
        advantages = advantages + kl
    advantages = normalise_tokens(
        torch.where(rank.mask, advantages.double(), 0), rank.mask, rank.cu_seqlens, terms.groups, config.adv_norm,
        over.sum, over.max, rank.num_groups,
    )  # fmt: skip
    figures = StepFigures(
        rank.trains, raw, shaped, penalty, rank.mask, turn_rewards, kl if config.kl_ctl else None, advantages, returns,
        values,
    )  # fmt: skip
    return Advantages(advantages, returns.double(), figures.sums(over) | group_statistics(voters, table[:, 4]))


@dataclass(frozen=True)
class _RankRows:
    """A rank's batches end to end."""

    batches: Sequence[PackedBatch]
    mask: Tensor  # [M] bool: tokens that train
    turns: Tensor  # [M]
    cu_seqlens: Tensor  # [S+1]
    rewards: Float64  # [S]
    groups: Int64  # [S] places among the step's groups
    num_groups: int
    samples: Int64  # [S]
    truncated: npt.NDArray[np.bool_]  # [S]
    num_sampled: Int64  # [S]
    trains: npt.NDArray[np.bool_]  # [S] sequences with a token that trains

    @classmethod
    def of(cls, batches: Sequence[PackedBatch], config: ActorConfig, groups: Sequence[int]) -> _RankRows:
        def flat(name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
            return np.concatenate([np.zeros(0, dtype), *(getattr(batch, name) for batch in batches)]).astype(dtype)

        lengths, truncated = flat("lengths", np.int64), flat("truncated", np.bool_)
        index = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        sampled = torch.from_numpy(flat("loss_mask", np.bool_))
        mask = sampled & ~torch.from_numpy(truncated)[index] if config.mask_truncated else sampled
        known = np.unique(np.asarray(groups, dtype=np.int64))
        numbers = flat("groups", np.int64)
        strange = np.setdiff1d(numbers, known)
        if len(strange):
            raise ValueError(
                f"groups: {strange[:3].tolist()} of the batches are not among the {len(known)} of the step"
            )
        return cls(
            batches=batches,
            mask=mask,
            turns=torch.from_numpy(flat("turns", np.int64)),
            cu_seqlens=torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])),
            rewards=flat("rewards", np.float64),
            groups=np.searchsorted(known, numbers).astype(np.int64),
            num_groups=len(known),
            samples=flat("samples", np.int64),
            truncated=truncated,
            num_sampled=segment_sum(sampled.long(), index, len(lengths)).numpy(),
            trains=(segment_sum(mask.long(), index, len(lengths)) > 0).numpy(),
        )

    @property
    def zeros_of_sequences(self) -> Tensor:
        return torch.zeros(len(self.rewards), dtype=torch.float64)

    @property
    def zeros_of_tokens(self) -> Tensor:
        return torch.zeros(len(self.mask), dtype=torch.float64)

    def column(self, name: str, absent: Tensor | None = None) -> Tensor:
        """An extra of all batches end to end in float64; `absent` where no batch has it."""
        filled = [batch for batch in self.batches if batch.num_sequences]
        found = [batch.extra[name] for batch in filled if name in batch.extra]
        if len(found) < len(filled) and (found or absent is None):
            raise ValueError(f"batch: {name} is missing in {len(filled) - len(found)} of {len(filled)} micro-batches")
        if not found and absent is not None:
            return absent
        return torch.from_numpy(np.concatenate([np.zeros(0), *found]).astype(np.float64))

    def turn_rewards(self, config: ActorConfig) -> Tensor:
        """[M] what turns have earned, on their last active tokens."""
        blank = [np.zeros(batch.num_tokens) for batch in self.batches]
        given = [batch.extra.get("turn_rewards", zeros) for batch, zeros in zip(self.batches, blank, strict=True)]
        flat = torch.from_numpy(np.concatenate([np.zeros(0), *given]).astype(np.float64))
        sampled = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *(b.loss_mask for b in self.batches)]))
        if (flat[sampled == 0] != 0).any():
            raise ValueError("turn_rewards: not 0 on a token that was not sampled, which belongs to no turn")
        return place_turn_rewards(flat, self.mask, self.turns, self.cu_seqlens, config)

    def kl_reward(self, config: ActorConfig) -> Tensor:
        """[M] `-kl_ctl KL` of the proximal policy where it was computed, else of the behaviour policy."""
        if not config.kl_ctl:
            return self.zeros_of_tokens
        policy = self.column("prox_logprobs", self.zeros_of_tokens)
        if not any("prox_logprobs" in batch.extra for batch in self.batches):
            flat = np.concatenate([np.zeros(0), *(batch.logprobs for batch in self.batches)])
            policy = torch.from_numpy(flat.astype(np.float64))
        return -config.kl_ctl * kl_reward(config.kl_estimator, policy, self.column("ref_logprobs"), self.mask)

    def values_and_bootstrap(self) -> tuple[Tensor | None, Tensor | None]:
        """[M] and [S], the latter 0 where a sequence is not truncated; None without a critic."""
        if not any("values" in batch.extra for batch in self.batches):
            return None, None
        end = self.column("bootstrap")
        return self.column("values"), torch.where(torch.from_numpy(self.truncated), end, 0)
