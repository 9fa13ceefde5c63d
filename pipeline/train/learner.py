"""The learner loop: the same on every trainer rank, told by the head what to do next.

Plan      read and verify this rank's rows, answer RowsRead; wait outside of any collective
Commit    train on them (`training_step.py`) -> StepDone                                        (collective from here)
Replan    forget the rows
CheckLogprobs, PublishWeights, ShareWeights
          collective too; the head sends them to all trainer ranks in one order
Save, Export, RollCall, StopTrainer: `head_orders.py`
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pekoe.pipeline import files
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.messages import (
    CheckLogprobs,
    Commit,
    LogprobsChecked,
    Message,
    Plan,
    PublishWeights,
    Replan,
    RowsRead,
    ShareWeights,
    StepDone,
    WeightsSent,
    WeightsShared,
)
from pekoe.pipeline.records import Finish, PackedBatch, RowKey, Trajectory, pack
from pekoe.pipeline.train.head_orders import ORDERS, HeadOrders
from pekoe.pipeline.train.training_step import TrainingStep

if TYPE_CHECKING:
    import torch

    from pekoe.pipeline.messages import TensorSpec

logger = logging.getLogger(__name__)

INBOX_KINDS: tuple[type[Message], ...] = (Plan, Commit, Replan, CheckLogprobs, PublishWeights, ShareWeights, *ORDERS)


class BadRowsError(Exception):
    """Rows that could not be read: (shard, row, reason)."""

    def __init__(self, bad: Sequence[tuple[str, int, str]]) -> None:
        super().__init__(f"{len(bad)} rows cannot be read: {bad[:3]}")
        self.bad = tuple(bad)


@dataclass
class LearnerParts:
    """What `runs/rl_trainer.py` passes in."""

    orders: HeadOrders
    """The engine there is the actor's: its weights are published."""
    read_rows: Callable[[Sequence[RowKey]], list[tuple[int, Trajectory]]]
    """In the order of the keys; raises BadRowsError."""
    step: TrainingStep
    transfer_error: type[Exception]
    """What `send_weights` raises when the transfer, not this rank, has failed."""
    send_weights: Callable[[PublishWeights, Sequence[TensorSpec], Iterator[tuple[str, torch.Tensor]]], None]
    share_weights: Callable[[int, Sequence[TensorSpec], Iterator[tuple[str, torch.Tensor]]], str]
    """Writes a version to disk for attached worlds; gives the token that they know it by."""
    check_sequences: list[list[int]]
    set_version: Callable[[int], None]


@dataclass
class Rows:
    """This rank's part of a step, read and packed: [minibatch][micro-batch]."""

    plan: Plan
    batches: list[list[PackedBatch]]


class Learner:
    """Owns the engines on its own thread."""

    def __init__(self, config: RunConfig, parts: LearnerParts, version: int) -> None:
        self.config, self.parts, self.version = config, parts, version
        self.rows: Rows | None = None
        self.orders = parts.orders
        self.post, self.head = self.orders.parts.post, self.orders.parts.head
        self.engine, self.set_phase = self.orders.parts.engine, self.orders.parts.set_phase

    def run(self) -> str:
        """Until StopTrainer; returns its reason."""
        for message in self.orders.of_learner():
            match message:
                case Plan():
                    self.read(message)
                case Commit():
                    self.step(message)
                case Replan():
                    self.rows = None
                case CheckLogprobs():
                    self.check_logprobs(message)
                case PublishWeights():
                    self.publish(message)
                case ShareWeights():
                    self.share(message)
                case _:
                    raise AssertionError(f"the learner cannot handle {message!r}")
        return self.orders.outcome

    def read(self, plan: Plan) -> None:
        """Reads this rank's rows; bad ones are told to the head, which replaces their groups."""
        keys = [
            RowKey(plan.shards[row.shard], row.row)
            for minibatch in plan.minibatches
            for micro_batch in minibatch
            for row in micro_batch
        ]
        try:
            read = iter(self.parts.read_rows(keys))
        except BadRowsError as error:
            self.post.send(self.head, RowsRead(plan.version, plan.round, error.bad))
            return
        batches = [[pack([next(read) for _ in rows]) for rows in minibatch] for minibatch in plan.minibatches]
        self.rows = Rows(plan, batches)
        self.post.send(self.head, RowsRead(plan.version, plan.round))

    def step(self, commit: Commit) -> None:
        """Trains on the rows that were read: version + 1, whatever the number of updates."""
        rows, self.rows = self.rows, None
        if rows is None or (rows.plan.version, rows.plan.round) != (commit.version, commit.round):
            raise AssertionError(f"{commit} without its plan")
        began = time.monotonic()
        stats = self.parts.step.run(rows.plan, rows.batches, self.set_phase)
        self.version = commit.version + 1
        self.parts.set_version(self.version)
        self.post.send(self.head, StepDone(self.version, time.monotonic() - began, stats))

    def publish(self, message: PublishWeights) -> None:
        """Streams the weights; the head rank reports, with the log-probs of the check sequences."""
        began = time.monotonic()
        error, disk_is_full = "", False
        try:
            self.parts.send_weights(message, self.engine.weight_specs(), self.engine.weights())
        except (self.parts.transfer_error, OSError) as failure:
            logger.exception("sending version %d failed", message.version)
            error = f"{type(failure).__name__}: {failure}"[:2000]
            disk_is_full = isinstance(failure, OSError) and files.is_full(failure)
        check = [float(x) for x in self._check_logprobs()]
        self.orders.answer_from_first(
            WeightsSent(message.version, time.monotonic() - began, tuple(check), error, disk_is_full)
        )

    def share(self, message: ShareWeights) -> None:
        """Writes the weights for attached worlds; the head rank reports."""
        began = time.monotonic()
        if message.version != self.version:
            raise AssertionError(f"{message} at version {self.version}")
        token, error, disk_is_full = "", "", False
        try:
            token = self.parts.share_weights(message.version, self.engine.weight_specs(), self.engine.weights())
        except (self.parts.transfer_error, OSError) as failure:
            logger.exception("version %d could not be written for attached worlds", message.version)
            error = f"{type(failure).__name__}: {failure}"[:2000]
            disk_is_full = isinstance(failure, OSError) and files.is_full(failure)
        seconds = time.monotonic() - began
        self.orders.answer_from_first(WeightsShared(message.version, seconds, token, error, disk_is_full))

    def check_logprobs(self, message: CheckLogprobs) -> None:
        """By the weights as they are: what engines are compared with before anything is sampled."""
        check = tuple(float(x) for x in self._check_logprobs())
        self.orders.answer_from_first(LogprobsChecked(message.version, check))

    def _check_logprobs(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Token-aligned, of all check sequences end to end, at the sampling temperature."""
        rows = [(0, _bare_trajectory(ids)) for ids in self.parts.check_sequences]
        (found,) = self.engine.forward([pack(rows)], self.config.gconfig.temperature)
        values: np.ndarray[tuple[int], np.dtype[np.float32]] = found.cpu().numpy()
        return values


def _bare_trajectory(ids: Sequence[int]) -> Trajectory:
    n = len(ids)
    mask = np.ones(n, dtype=np.uint8)
    mask[0] = 0
    return Trajectory(
        tokens=np.asarray(ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(n, dtype=np.float32),
        versions=np.where(mask == 1, 0, -1).astype(np.int32),
        turns=np.where(mask == 1, 0, -1).astype(np.int32),
        prompt_length=1,
        reward=0.0,
        finish=Finish.STOP,
    )
