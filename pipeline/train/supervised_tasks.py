"""What is done with the rows of a supervised task: sft, dpo (with a frozen reference), rw (with a value head)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pekoe.pipeline.train.companions import add_logprobs
from pekoe.pipeline.train.engine import LossFunction, TrainEngine, ValueLossFunction
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.step_statistics import Over
from pekoe.pipeline.train.supervised_learner import RankRows

TEMPERATURE = 1.0

Sums = dict[str, torch.Tensor]


@dataclass
class LogprobTask:
    """sft and dpo: a loss on token log-probs."""

    engine: TrainEngine
    ranks: Over
    make_loss: Callable[[RankRows], LossFunction]
    reference: TrainEngine | None = None
    """Frozen; fills `ref_logprobs` where the loss reads it."""

    def train(self, rows: RankRows) -> dict[str, float]:
        """See `SupervisedTask`."""
        add_logprobs(self.reference, "ref_logprobs", rows.batches, TEMPERATURE)
        return self.engine.train_batch(rows.batches, self.make_loss(rows), TEMPERATURE)

    def evaluate(self, rows: RankRows) -> dict[str, float]:
        """See `SupervisedTask`."""
        add_logprobs(self.reference, "ref_logprobs", rows.batches, TEMPERATURE)
        loss = self.make_loss(rows)
        found = self.engine.forward(rows.batches, TEMPERATURE)
        sums = [
            loss(logprobs, None, batch_tensors(batch, logprobs.device))[1]
            for batch, logprobs in zip(rows.batches, found, strict=True)
        ]
        return _added(sums, self.ranks)


@dataclass
class ScoreTask:
    """rw: a loss on the score at each sequence's last token."""

    engine: TrainEngine
    ranks: Over
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


def _added(parts: Sequence[Sums], ranks: Over) -> dict[str, float]:
    """Sums over micro-batches and ranks; every rank has at least one micro-batch, and the same names."""
    names = sorted(parts[0])
    table = torch.stack([torch.stack([part[name].to(torch.float64) for name in names]) for part in parts])
    return dict(zip(names, ranks.sum(table.sum(dim=0)).tolist(), strict=True))
