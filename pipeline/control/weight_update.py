"""One weight transfer after the other: who takes part, who is ready, who has confirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pekoe.pipeline.messages import (
    Post,
    PrepareWeights,
    PublishWeights,
    TensorSpec,
    WeightsLoaded,
    WeightsReady,
    WeightsSent,
)


class WeightUpdateError(RuntimeError):
    """An engine or the sender failed, or engine and trainer disagree on log-probs."""


@dataclass
class WeightUpdates:
    """The transfer group of an epoch is kept while membership is unchanged; a failure opens a new epoch."""

    post: Post
    trainer_ranks: Sequence[int]
    rollout_ranks: Sequence[int]
    open_epoch: Callable[[int, tuple[int, ...]], str]
    tensor_specs: Callable[[], tuple[TensorSpec, ...]]
    gap_limit: float
    epoch: int = -1
    version: int = -1
    epoch_is_open: bool = False
    ready: set[int] = field(default_factory=set)
    sent: WeightsSent | None = None
    loaded: dict[int, WeightsLoaded] = field(default_factory=dict)

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks of the transfer group, the sender first; the sender may be an engine's rank too (colocated)."""
        return (self.trainer_ranks[0], *self.rollout_ranks)

    def prepare(self, version: int) -> None:
        """Tells every engine to stop at a token for `version`."""
        self.version, self.sent = version, None
        self.ready.clear()
        self.loaded.clear()
        endpoint = ""
        specs: tuple[TensorSpec, ...] = ()
        if not self.epoch_is_open:
            self.epoch += 1
            endpoint = self.open_epoch(self.epoch, self.members)
            specs = self.tensor_specs()
            self.epoch_is_open = True
        message = PrepareWeights(version, self.epoch, self.members, endpoint, specs)
        for rank in self.rollout_ranks:
            self.post.send(rank, message)

    def publish(self) -> None:
        """Every engine is ready: the trainer ranks stream."""
        for rank in self.trainer_ranks:
            self.post.send(rank, PublishWeights(self.version, self.epoch, self.members))

    def on_ready(self, rank: int, message: WeightsReady) -> None:
        if message.version == self.version and message.epoch == self.epoch:
            self.ready.add(rank)

    def on_sent(self, message: WeightsSent) -> None:
        if message.version == self.version:
            self.sent = message

    def on_loaded(self, rank: int, message: WeightsLoaded) -> None:
        if message.version == self.version:
            self.loaded[rank] = message

    @property
    def all_ready(self) -> bool:
        return len(self.ready) == len(self.rollout_ranks)

    @property
    def is_over(self) -> bool:
        """Sender and engines have all answered, well or not."""
        return self.sent is not None and len(self.loaded) == len(self.rollout_ranks)

    def errors(self) -> list[str]:
        """What went wrong in the finished transfer; a failure closes the epoch."""
        found = [f"engine on rank {rank}: {m.error}" for rank, m in sorted(self.loaded.items()) if m.error]
        if self.sent is not None and self.sent.error:
            found.append(f"sender: {self.sent.error}")
        if found:
            self.epoch_is_open = False
        return found

    def logprob_gap(self) -> tuple[float, float]:
        """(mean, max) of |log-prob(engine) - log-prob(trainer)| on the check sequences, over all engines."""
        assert self.sent is not None
        trainer = np.asarray(self.sent.check, dtype=np.float64)
        gaps = [np.abs(np.asarray(m.check, dtype=np.float64) - trainer) for m in self.loaded.values() if m.check]
        if not gaps or not len(trainer):
            return 0.0, 0.0
        mean, largest = float(np.mean(gaps)), float(np.max(gaps))
        if not mean <= self.gap_limit:
            raise WeightUpdateError(
                f"engines and trainer disagree at version {self.version}: mean |log-prob gap| {mean:.4g} > "
                f"rollout.logprob_gap_limit {self.gap_limit}; the weights did not arrive as they are, or the two "
                "compute differently"
            )
        return mean, largest
