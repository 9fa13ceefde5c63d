"""One evaluation on the validation set beside training: never trained on, never counted by admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pekoe.pipeline.messages import AssignEvaluation, Evaluated, Post


@dataclass
class Evaluation:
    """Every example exactly once, a bounded number at a time on each rank."""

    name: int
    """The version at which it was asked for."""
    num_examples: int
    n_samples: int
    ranks: Sequence[int]
    """Those that take part."""
    post: Post
    window: int = 64
    """Most examples in flight on one rank."""
    next_example: int = 0
    results: dict[int, Evaluated] = field(default_factory=dict)

    def begin(self) -> None:
        for _ in range(self.window):
            for rank in self.ranks:
                self._feed(rank)

    def on_evaluated(self, rank: int, message: Evaluated) -> None:
        if message.evaluation == self.name and message.example not in self.results:
            self.results[message.example] = message
            self._feed(rank)

    def _feed(self, rank: int) -> None:
        if self.next_example < self.num_examples:
            self.post.send(rank, AssignEvaluation(self.name, self.next_example, self.n_samples))
            self.next_example += 1

    @property
    def is_complete(self) -> bool:
        return len(self.results) == self.num_examples

    def metrics(self) -> dict[str, float]:
        """`eval/accuracy` is the mean reward over examples (each with the mean of its samples)."""
        scored = [r for r in self.results.values() if r.rewards]
        figures = {"eval/examples": float(len(scored)), "eval/failed": float(len(self.results) - len(scored))}
        if scored:
            rewards = [float(np.mean(r.rewards)) for r in scored]
            figures["eval/accuracy"] = float(np.mean(rewards))
            figures["eval/length"] = float(np.mean([length for r in scored for length in r.lengths]))
            figures["eval/truncated"] = float(np.mean([t for r in scored for t in r.truncated]))
            figures["eval/min_version"] = float(min(r.min_version for r in scored))
            figures["eval/max_version"] = float(max(r.max_version for r in scored))
        return figures
