"""Models that judge trajectories: by a value head's output, or by the probability of an answer to a question.

What is judged ends at a token: the last one of the sequence (unit `outcome`), or the last sampled one of each turn
(unit `turn`: a process reward model). A score may depend on nothing but the tokens up to there, so it is the same
whatever the sequence is packed with.

Legend: M tokens laid end to end, S sequences, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pekoe.pipeline.config.companions import RewardModelConfig
from pekoe.pipeline.records import TURN_REWARDS, Finish, Float64, Int32, Int64, PackedBatch, Trajectory, pack
from pekoe.pipeline.train.engine import TrainEngine

HeadOutputs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(values [M], scores [S], cu_seqlens) -> a value head's outputs [M] at every position."""
Cut = Callable[[Sequence[int]], list[list[int]]]
"""Lengths of this rank's rows -> rows of each micro-batch; collective, since it gives the same number on all ranks."""


def unit_ends(batch: PackedBatch, unit: str) -> Int64:
    """[U] positions of the last token of what is judged, in order."""
    if unit == "outcome":
        return batch.cu_seqlens[1:].astype(np.int64) - 1
    active = np.flatnonzero(batch.loss_mask)
    row, turn = batch.sequence_index[active], batch.turns[active]
    is_last = np.ones(len(active), dtype=bool)
    is_last[:-1] = (row[1:] != row[:-1]) | (turn[1:] != turn[:-1])
    return active[is_last].astype(np.int64)


def put_scores(batch: PackedBatch, ends: Int64, scores: Float64, config: RewardModelConfig) -> None:
    """Scores [U] become `model_scores` [S], or are added to `turn_rewards` [M]."""
    if config.unit == "outcome":
        batch.extra["model_scores"] = scores * config.weight
        return
    rewards = np.zeros(batch.num_tokens, np.float32)
    rewards[ends] = scores * config.weight
    batch.extra[TURN_REWARDS] = rewards + batch.extra.get(TURN_REWARDS, np.float32(0))


@dataclass
class ScalarRewardModel:
    """The score is the output of a value head at the unit's last token."""

    engine: TrainEngine
    config: RewardModelConfig
    head_outputs: HeadOutputs

    def add(self, batches: Sequence[PackedBatch]) -> None:
        """See `RewardModel`; in the batches' own packing."""
        for batch, (values, scores) in zip(batches, self.engine.forward_values(batches), strict=True):
            outputs = self.head_outputs(values.cpu(), scores.cpu(), torch.from_numpy(batch.cu_seqlens.copy()))
            ends = unit_ends(batch, self.config.unit)
            put_scores(batch, ends, outputs.to(torch.float64).numpy()[ends], self.config)

    def close(self) -> None:
        self.engine.close()


@dataclass
class GenerativeRewardModel:
    """The score is the probability of the tokens of an answer, after the unit and the tokens of a question."""

    engine: TrainEngine
    config: RewardModelConfig
    question: Int32
    answer: Int32
    cut: Cut

    def add(self, batches: Sequence[PackedBatch]) -> None:
        """See `RewardModel`; packed anew, since each unit is a row of its own and longer by question and answer."""
        ends = [unit_ends(batch, self.config.unit) for batch in batches]
        rows = [row for batch, last in zip(batches, ends, strict=True) for row in self._rows(batch, last)]
        parts = self.cut([len(row.tokens) for row in rows])
        asked = [pack([(0, rows[index]) for index in part]) for part in parts]
        scores = np.zeros(len(rows), np.float64)
        for part, batch, logprobs in zip(parts, asked, self.engine.forward(asked, 1.0), strict=True):
            scores[part] = _answer_probabilities(batch, logprobs)
        counts = np.cumsum([len(last) for last in ends])[:-1]
        for batch, last, found in zip(batches, ends, np.split(scores, counts), strict=True):
            put_scores(batch, last, found, self.config)

    def close(self) -> None:
        self.engine.close()

    def _rows(self, batch: PackedBatch, ends: Int64) -> list[Trajectory]:
        """Each unit with question and answer; the answer alone is active."""
        starts = batch.cu_seqlens[batch.sequence_index[ends]]
        return [self._row(batch.tokens[start : end + 1]) for start, end in zip(starts, ends, strict=True)]

    def _row(self, judged: Int32) -> Trajectory:
        before = len(judged) + len(self.question)
        mask = np.zeros(before + len(self.answer), np.uint8)
        mask[before:] = 1
        marks = np.where(mask == 1, 0, -1).astype(np.int32)
        return Trajectory(
            tokens=np.concatenate([judged, self.question, self.answer]),
            loss_mask=mask,
            logprobs=np.zeros(len(mask), np.float32),
            versions=marks,
            turns=marks,
            prompt_length=before,
            reward=0.0,
            finish=Finish.STOP,
        )


def _answer_probabilities(batch: PackedBatch, logprobs: torch.Tensor) -> Float64:
    """[S] exp of the sum of each sequence's log-probs [M]."""
    sums = np.zeros(batch.num_sequences, np.float64)
    np.add.at(sums, batch.sequence_index, logprobs.cpu().to(torch.float64).numpy())
    return np.exp(sums)
