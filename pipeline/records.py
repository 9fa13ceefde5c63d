"""The words of the product as small record types; every stage fills or reads these, and nothing else.

Legend of shapes: T tokens of one sequence, M tokens of many sequences laid end to end, S sequences.
Everything is in token alignment: index t of any array speaks of token t itself.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pekoe.kernels.packing import ragged

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

POSITION_BITS = 40
TURN_REWARDS, TEACHER_LOGPROBS = "turn_rewards", "teacher_logprobs"
"""What `Trajectory.extra` may hold."""
HIGHEST_LOGPROB = 1e-4
"""Above 0 by rounding alone."""


def group_number(epoch: int, position: int) -> int:
    """The admission number of a group as one int64: numeric order is the cursor's order."""
    if not 0 <= epoch < 1 << (62 - POSITION_BITS) or not 0 <= position < 1 << POSITION_BITS:
        raise ValueError(f"epoch {epoch}, position {position}: out of the range of an admission number")
    return epoch << POSITION_BITS | position


def epoch_and_position(group: int) -> tuple[int, int]:
    """Inverse of `group_number`."""
    return group >> POSITION_BITS, group & ((1 << POSITION_BITS) - 1)


def sampling_seed(run_seed: int, group: int, try_number: int, sample: int, call: int = 0) -> int:
    """Seed of one completion: a 63-bit hash of (run, group, try, sample, call in the episode)."""
    text = f"{run_seed}/{group}/{try_number}/{sample}/{call}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Finish(enum.IntEnum):
    """Why a completion ended."""

    STOP = 0
    """An end token, a stop token or a stop string was sampled (it is kept, with its log-prob)."""
    LENGTH = 1
    """`max_new_tokens` or the context limit was reached: the sequence is truncated."""
    ABORT = 2
    """Cancelled before its end; never trained on."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a dataset."""

    index: int
    """Row in the dataset: an assignment carries this, not the content."""
    name: str
    """Stable id for people (`gsm8k/train/17`)."""
    messages: tuple[dict[str, str], ...]
    """Chat messages `{"role", "content"}` that make the prompt."""
    data: dict[str, Any]
    """What the reward needs: passed to the reward function as keyword arguments (`answer`, …)."""


@dataclass(slots=True)
class Trajectory:
    """One sequence: prompt and sampled tokens, with what training needs to know of each token."""

    tokens: Int32  # [T]
    loss_mask: UInt8  # [T] 1 = sampled by the policy
    logprobs: Float32  # [T] behaviour log-probs at the sampling temperature; 0 where loss_mask is 0
    versions: Int32  # [T] weight version that sampled the token; -1 where loss_mask is 0
    turns: Int32  # [T] turn in which it was sampled, from 0; -1 where loss_mask is 0
    prompt_length: int
    reward: float
    finish: Finish
    seed: int = 0
    sample: int = 0
    """Which episode of the group made it."""
    info: dict[str, Any] = field(default_factory=dict)
    """Free JSON for people: score details, workflow notes."""
    extra: dict[str, Float32] = field(default_factory=dict)
    """Token-aligned arrays [T] that few runs have: `turn_rewards` (what a turn has earned, on its last sampled token,
    0 elsewhere; beside `reward`), `teacher_logprobs` (0 where loss_mask is 0)."""

    @property
    def truncated(self) -> bool:
        return self.finish == Finish.LENGTH

    @property
    def total_reward(self) -> float:
        """The outcome's reward and those of the turns."""
        turn_rewards = self.extra.get(TURN_REWARDS)
        return self.reward if turn_rewards is None else self.reward + float(turn_rewards.sum(dtype=np.float64))

    def check(self) -> None:
        """Raises ValueError unless the arrays agree in length, are finite, and something was sampled."""
        n = len(self.tokens)
        for name in ("loss_mask", "logprobs", "versions", "turns"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"trajectory: {name} has {len(getattr(self, name))} entries for {n} tokens")
        active = self.loss_mask.astype(bool)
        if not active.any():
            raise ValueError("trajectory: no token was sampled (loss_mask is 0 everywhere)")
        if active[0] or not 0 < self.prompt_length < n:
            raise ValueError(
                f"trajectory: prompt_length {self.prompt_length} of {n} tokens; the first token is never sampled"
            )
        if not np.isfinite(self.logprobs).all() or (self.logprobs > HIGHEST_LOGPROB).any():
            raise ValueError("trajectory: a log-prob is not finite or is positive")
        if not np.isfinite(self.reward):
            raise ValueError(f"trajectory: reward {self.reward} is not finite")
        if (self.versions[active] < 0).any() or (self.versions[~active] != -1).any():
            raise ValueError("trajectory: versions must be >= 0 on sampled tokens and -1 elsewhere")
        for name, values in self.extra.items():
            self._check_extra(name, values, active)

    def _check_extra(self, name: str, values: Float32, active: npt.NDArray[np.bool_]) -> None:
        if name not in (TURN_REWARDS, TEACHER_LOGPROBS):
            raise ValueError(f"trajectory: extra {name!r} is not known; allowed: {TURN_REWARDS}, {TEACHER_LOGPROBS}")
        if len(values) != len(self.tokens):
            raise ValueError(f"trajectory: {name} has {len(values)} entries for {len(self.tokens)} tokens")
        if not np.isfinite(values).all():
            raise ValueError(f"trajectory: an entry of {name} is not finite")
        if name == TEACHER_LOGPROBS:
            if (values > HIGHEST_LOGPROB).any() or values[~active].any():
                raise ValueError(f"trajectory: {name} must be log-probs, and 0 where nothing was sampled")
        elif not turn_rewards_are_sound(values, active, self.turns, np.zeros(1, np.int64)):
            raise ValueError(f"trajectory: {name} must be 0 but on the last sampled token of a turn")


def turn_rewards_are_sound(
    rewards: Float32, active: npt.NDArray[np.bool_], turns: Int32, starts: npt.NDArray[np.integer[Any]]
) -> bool:
    """Whether only the last sampled token of a turn has a reward; sequences begin at `starts`."""
    rewarded, sampled = np.flatnonzero(rewards), np.flatnonzero(active)
    if not active[rewarded].all():
        return False
    place = np.searchsorted(sampled, rewarded)
    has_next = place + 1 < len(sampled)
    here, after = rewarded[has_next], sampled[place[has_next] + 1]
    same_row = np.searchsorted(starts, here, "right") == np.searchsorted(starts, after, "right")
    return not (same_row & (turns[here] == turns[after])).any()


@dataclass(slots=True)
class Group:
    """The episodes of one prompt, accepted or rejected together."""

    number: int
    """Admission number, see `group_number`."""
    try_number: int
    example: str
    """Name of the example."""
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class RowKey:
    """Where one sequence lies: a shard (path relative to the run directory) and its row in it."""

    shard: str
    row: int


@dataclass(slots=True)
class PackedBatch:
    """Sequences laid end to end: what a trainer engine computes on. Plain numpy, no padding."""

    tokens: Int32  # [M]
    cu_seqlens: Int32  # [S+1] starts at 0, ends at M
    loss_mask: UInt8  # [M]
    logprobs: Float32  # [M] behaviour log-probs
    versions: Int32  # [M]
    turns: Int32  # [M]
    rewards: Float64  # [S] as the reward function gave them
    groups: Int64  # [S] admission numbers
    samples: Int32  # [S]
    truncated: UInt8  # [S]
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further token- or sequence-aligned arrays by name: of trajectories `turn_rewards` and `teacher_logprobs` [M];
    of models `prox_logprobs`, `ref_logprobs`, `values` [M], `bootstrap` and `model_scores` [S]; of the algorithm
    `advantages` and `returns` [M]."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Int32:
        return np.diff(self.cu_seqlens)

    @property
    def position_ids(self) -> Int32:
        """[M] positions that restart at 0 in each sequence."""
        return ragged.position_ids(self.cu_seqlens)

    @property
    def sequence_index(self) -> Int32:
        """[M] which sequence a token belongs to."""
        return ragged.sequence_index(self.cu_seqlens)


def pack(rows: Sequence[tuple[int, Trajectory]]) -> PackedBatch:
    """Lays trajectories end to end; `rows` are (group number, trajectory). An empty list gives an empty batch.

    Of `extra` is there what some row has: rows without turn rewards have 0 everywhere. ValueError when only some of the
    rows have log-probs of a teacher.
    """
    trajectories = [trajectory for _, trajectory in rows]

    def flat(name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        arrays = [getattr(t, name) for t in trajectories]
        return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)

    lengths = np.array([len(t.tokens) for t in trajectories], dtype=np.int32)
    return PackedBatch(
        tokens=flat("tokens", np.int32),
        cu_seqlens=np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]),
        loss_mask=flat("loss_mask", np.uint8),
        logprobs=flat("logprobs", np.float32),
        versions=flat("versions", np.int32),
        turns=flat("turns", np.int32),
        rewards=np.array([t.reward for t in trajectories], dtype=np.float64),
        groups=np.array([group for group, _ in rows], dtype=np.int64),
        samples=np.array([t.sample for t in trajectories], dtype=np.int32),
        truncated=np.array([t.truncated for t in trajectories], dtype=np.uint8),
        extra={
            name: np.concatenate([extra_or_zeros(name, t) for t in trajectories]).astype(np.float32, copy=False)
            for name in (TURN_REWARDS, TEACHER_LOGPROBS)
            if has_extra(name, trajectories)
        },
    )


def common_prefix(row: npt.NDArray[np.integer[Any]], other: npt.NDArray[np.integer[Any]]) -> int:
    """How many tokens two sequences have in common at their beginning, the last one of either left out."""
    most = min(len(row), len(other)) - 1
    if most <= 0:
        return 0
    differs = row[:most] != other[:most]
    first = int(differs.argmax())
    return first if differs[first] else most


def has_extra(name: str, trajectories: Sequence[Trajectory]) -> bool:
    """Whether some trajectory has this array. ValueError when only some of them have log-probs of a teacher."""
    count = sum(name in t.extra for t in trajectories)
    if name == TEACHER_LOGPROBS and 0 < count < len(trajectories):
        raise ValueError(
            f"{name} is on {count} of {len(trajectories)} trajectories; allowed: on all of them, or on none"
        )
    return count > 0


def extra_or_zeros(name: str, trajectory: Trajectory) -> Float32:
    """The array, or zeros where the trajectory has none."""
    found = trajectory.extra.get(name)
    return np.zeros(len(trajectory.tokens), np.float32) if found is None else found
