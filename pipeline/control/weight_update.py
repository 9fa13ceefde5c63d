"""One weight transfer after the other: who takes part, who is ready, who has confirmed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pekoe.pipeline.config.schedule import WeightsConfig
from pekoe.pipeline.control.pump import Pump
from pekoe.pipeline.messages import (
    Post,
    PrepareWeights,
    PublishWeights,
    TensorSpec,
    WeightsLoaded,
    WeightsReady,
    WeightsSent,
)

logger = logging.getLogger(__name__)

MAX_TRANSFER_TRIES = 3
WHO = "the weights"


class WeightUpdateError(RuntimeError):
    """An engine or the sender failed, or engine and trainer disagree on log-probs."""


@dataclass
class WeightUpdates:
    """The transfer group of an epoch is kept while membership is unchanged; a failure opens a new epoch."""

    post: Post
    limits: WeightsConfig
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

    def bring(self, version: int, pump: Pump, may_give_up: Callable[[], bool]) -> float:
        """Brings every engine to this version; gives for how many seconds the slowest one stood still.

        A failed transfer is tried again in a new group. Raises WeightUpdateError after MAX_TRANSFER_TRIES. What only
        lacks room on the disk is tried until there is some, or `may_give_up`.
        """
        pump.handlers.update(
            {
                WeightsReady: self.on_ready,
                WeightsSent: lambda source, message: self.on_sent(message),
                WeightsLoaded: self.on_loaded,
            }
        )
        failures = 0
        while True:
            self.prepare(version)
            pump.wait(
                lambda: self.all_ready or None,
                "engines to stop at a token",
                self.limits.ready_seconds,
                self.not_ready,
                key="weights.ready_seconds",
            )
            self.publish()
            pump.wait(lambda: self.is_over or None, f"weights of version {version} to arrive", on=self.unanswered)
            errors = self.errors()
            if not errors:
                pump.disk.accept(WHO)
                return max(message.seconds for message in self.loaded.values())
            text = "; ".join(errors)
            if self.disk_is_full:
                pump.wait_for_room(WHO, text)
                if may_give_up():
                    return 0.0
                continue
            failures += 1
            logger.warning("transfer of version %d failed (try %d): %s", version, failures, text)
            if failures == MAX_TRANSFER_TRIES:
                raise WeightUpdateError(f"version {version} could not be brought to the engines: {text}")

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

    def not_ready(self) -> list[int]:
        """Engines that have not stopped yet."""
        return [rank for rank in self.rollout_ranks if rank not in self.ready]

    def unanswered(self) -> list[int]:
        """Who has not answered yet: the sender, engines."""
        sender = [self.trainer_ranks[0]] if self.sent is None else []
        return sender + [rank for rank in self.rollout_ranks if rank not in self.loaded]

    @property
    def disk_is_full(self) -> bool:
        """The sender had no room for this version's files."""
        return self.sent is not None and self.sent.disk_is_full

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
