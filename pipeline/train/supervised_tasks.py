"""What is done with the rows of a supervised task: sft, dpo (with a frozen reference), rw (with a value head)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.engine import LossFunction, TrainEngine, ValueLossFunction
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.supervised_learner import RankRows

TEMPERATURE = 1.0

Sums = dict[str, torch.Tensor]


class SumOverRanks(Protocol):
    """All-reduces a tensor over the trainer ranks."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor: ...


@dataclass
class LogprobTask:
    """sft and dpo: a loss on token log-probs."""

    engine: TrainEngine
    ranks: SumOverRanks
    make_loss: Callable[[RankRows], LossFunction]
    reference: TrainEngine | None = None
    """Frozen; fills `ref_logprobs` where the loss reads it."""

    def train(self, rows: RankRows) -> dict[str, float]:
        """See `SupervisedTask`."""
        self._add_reference(rows.batches)
        return self.engine.train_batch(rows.batches, self.make_loss(rows), TEMPERATURE)

    def evaluate(self, rows: RankRows) -> dict[str, float]:
        """See `SupervisedTask`."""
        self._add_reference(rows.batches)
        loss = self.make_loss(rows)
        found = self.engine.forward(rows.batches, TEMPERATURE)
        sums = [
            loss(logprobs, None, batch_tensors(batch, logprobs.device))[1]
            for batch, logprobs in zip(rows.batches, found, strict=True)
        ]
        return _added(sums, self.ranks)

    def _add_reference(self, batches: Sequence[PackedBatch]) -> None:
        if self.reference is None:
            return
        found = self.reference.forward(batches, TEMPERATURE)
        for batch, logprobs in zip(batches, found, strict=True):
            batch.extra["ref_logprobs"] = logprobs.cpu().numpy()


@dataclass
class ScoreTask:
    """rw: a loss on the score at each sequence's last token."""

    engine: TrainEngine
    ranks: SumOverRanks
    make_loss: Callable[[RankRows], ValueLossFunction]

    def train(self, rows: RankRows) -> dict[str, float]:
        """See `SupervisedTask`."""
        return self.engine.train_batch(rows.batches, self.make_loss(rows))

    def evaluate(self, rows: RankRows) -> dict[str, float]:
        """See `SupervisedTask`."""
        loss = self.make_loss(rows)
        found = self.engine.forward_values(rows.batches)
        sums = [
            loss(values, scores, batch_tensors(batch, values.device))[1]
            for batch, (values, scores) in zip(rows.batches, found, strict=True)
        ]
        return _added(sums, self.ranks)


def _added(parts: Sequence[Sums], ranks: SumOverRanks) -> dict[str, float]:
    """Sums over micro-batches and ranks; every rank has at least one micro-batch, and the same names."""
    names = sorted(parts[0])
    table = torch.stack([torch.stack([part[name].to(torch.float64) for name in names]) for part in parts])
    return dict(zip(names, ranks.sum(table.sum(dim=0)).tolist(), strict=True))
