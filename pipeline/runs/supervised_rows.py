"""The rows of a supervised step: which examples, in what micro-batches, on which rank. The same answer on every rank.

    version ─► positions of the order (seed, epoch) ─► each rank encodes its share, facts are exchanged ─► one plan,
    worked out everywhere alike ─► each rank encodes the rows that it trains on

The order is a pure function of seed, epoch and step: nothing of it needs to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pekoe.pipeline.batch.plan import plan_batch
from pekoe.pipeline.config.actor import MicroBatchConfig
from pekoe.pipeline.data.cursor import epoch_order
from pekoe.pipeline.data.dataset import Dataset
from pekoe.pipeline.data.encoder import EQUAL_SIDES, NO_LABEL, Encoded, Encoder, Labelled
from pekoe.pipeline.records import Finish, Int64, Trajectory, group_number, pack
from pekoe.pipeline.train.supervised_learner import RankRows

REASONS = ("", NO_LABEL, EQUAL_SIDES)
"""Why an example does not train, by the number that ranks exchange."""
KEPT_ENCODINGS = 4
"""Encoded examples that are kept, in batches: a rank often trains on what it has measured."""


class Ranks(Protocol):
    """The trainer ranks, as far as rows are exchanged among them (`train/trainer_group.py`)."""

    def gather(self, array: Int64) -> Int64: ...


class RowSource:
    """Examples of one data set as labelled tokens; remembers the last ones."""

    def __init__(self, dataset: Dataset, encoder: Encoder, num_remembered: int) -> None:
        self._dataset, self._encoder, self._most = dataset, encoder, num_remembered
        self._remembered: dict[int, Encoded] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def encoded(self, example: int) -> Encoded:
        """The same tokens whoever asks. ValueError names an example that cannot be encoded."""
        found = self._remembered.get(example)
        if found is None:
            found = self._encoder.encode(self._dataset[example])
            while len(self._remembered) >= self._most:
                self._remembered.pop(next(iter(self._remembered)))
            self._remembered[example] = found
        return found


class EpochOrder:
    """Which examples a step takes: `batch_size` positions a step, epochs one after the other without a gap."""

    def __init__(self, num_examples: int, batch_size: int, epochs: int, seed: int, shuffle: bool) -> None:
        self._size, self._batch_size, self._end = num_examples, batch_size, num_examples * epochs
        self._seed, self._shuffle = seed, shuffle
        self._epoch = -1
        self._order: Int64 = np.zeros(0, np.int64)

    def of_step(self, version: int) -> list[tuple[int, int]]:
        """(group number, example) of each position; the last step may have fewer."""
        first = version * self._batch_size
        return [self._at(ordinal) for ordinal in range(first, min(first + self._batch_size, self._end))]

    def _at(self, ordinal: int) -> tuple[int, int]:
        epoch, position = divmod(ordinal, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self._size, self._seed, epoch, self._shuffle)
        return group_number(epoch, position), int(self._order[position])


@dataclass(frozen=True)
class RowPlanner:
    """Cuts examples into micro-batches for the trainer ranks; `sides` is 1, or 2 for pairs, which never split."""

    ranks: Ranks
    rank: int
    """Among the trainer ranks."""
    num_ranks: int
    sides: int
    budget: MicroBatchConfig

    def rows(self, source: RowSource, examples: Sequence[tuple[int, int]]) -> RankRows:
        """(group number, example) of each -> this rank's share; collective over the trainer ranks."""
        facts = self._facts(source, [example for _, example in examples])
        kept = [i for i in range(len(examples)) if not REASONS[int(facts[i, 1])]]
        lengths = facts[kept, 3::2].reshape(-1)
        num_labels = int(facts[kept, 4::2].sum())
        plan = plan_batch(
            lengths,
            np.repeat([examples[i][0] for i in kept], self.sides),
            self.num_ranks,
            self.budget.max_tokens_per_mb,
            self.budget.max_sequences_per_mb,
            granularity=self.sides,
        )
        batches = []
        for indices in plan[self.rank][0] if kept else ():
            rows = [(*examples[kept[int(i) // self.sides]], int(i) % self.sides) for i in indices]
            batches.append(
                pack([
                    (group, as_trajectory(source.encoded(example).sequences[side], side))
                    for group, example, side in rows
                ])
            )  # fmt: skip
        return RankRows(batches, num_labels, len(kept), _figures(facts, lengths))

    def _facts(self, source: RowSource, examples: Sequence[int]) -> Int64:
        """[N, 3 + 2 sides] of all examples: number in this list, number of the reason, sequences that were cut, then
        tokens and labels of each sequence. Each rank encodes every `num_ranks`-th example."""
        own = np.zeros((len(examples[self.rank :: self.num_ranks]), 3 + 2 * self.sides), dtype=np.int64)
        for row, i in enumerate(range(self.rank, len(examples), self.num_ranks)):
            found = source.encoded(examples[i])
            own[row, :3] = i, REASONS.index(found.dropped), found.num_truncated
            for side, (tokens, labels) in enumerate(found.sequences):
                own[row, 3 + 2 * side :][:2] = len(tokens), int(labels.sum())
        every = self.ranks.gather(own)
        return every[np.argsort(every[:, 0], kind="stable")]


def as_trajectory(sequence: Labelled, side: int) -> Trajectory:
    """Labelled tokens as what trainers read; nothing of it was sampled."""
    tokens, labels = sequence
    n = len(tokens)
    return Trajectory(
        tokens=tokens,
        loss_mask=labels,
        logprobs=np.zeros(n, np.float32),
        versions=np.full(n, -1, np.int32),
        turns=np.where(labels, 0, -1).astype(np.int32),
        prompt_length=int(np.argmax(labels)),
        reward=0.0,
        finish=Finish.STOP,
        sample=side,
    )


def _figures(facts: Int64, lengths: Int64) -> dict[str, float]:
    """Sums over the examples of a step, equal on all ranks."""
    found = {"rows/truncated": float(facts[:, 2].sum()), "rows/examples": float(len(facts))}
    for number, reason in enumerate(REASONS):
        if reason:
            found[f"rows/dropped_{reason}"] = float((facts[:, 1] == number).sum())
    found["rows/tokens"] = float(lengths.sum())
    found["rows/sequences"] = float(len(lengths))
    return found
