"""The loop of a supervised run: the same on every trainer rank, told by the head when to go on.

Commit     the rows of a step (an order that every rank works out for itself) -> one optimiser update -> StepDone
Evaluate   some validation examples, forward only -> EvaluationPart                          (collective, like a step)
Save, Export, RollCall, StopTrainer: `head_orders.py`

No rank waits inside of a collective for anything but its peers' arithmetic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pekoe.pipeline.messages import Commit, Evaluate, EvaluationPart, Message, StepDone
from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.head_orders import ORDERS, HeadOrders

logger = logging.getLogger(__name__)

INBOX_KINDS: tuple[type[Message], ...] = (Commit, Evaluate, *ORDERS)
AS_THEY_ARE = ("loss", "labels", "pairs", "grad_norm", "lr", "update_skipped")
"""Of a step's statistics; the others are sums over pairs, and are told as means."""


@dataclass(frozen=True)
class RankRows:
    """This rank's share of the rows that are trained on together, and numbers over all ranks."""

    batches: Sequence[PackedBatch]
    """Micro-batches, as many as on every other rank; none when no row of all ranks trains."""
    num_labels: int
    num_examples: int
    """Demonstrations or pairs that train."""
    figures: Mapping[str, float]
    """Sums over examples for metrics: `rows/dropped_<reason>`, `rows/truncated`, `rows/tokens`, …"""


class SupervisedTask(Protocol):
    """What distinguishes sft, dpo and rw."""

    def train(self, rows: RankRows) -> dict[str, float]:
        """One update; the engine's sums over all ranks."""
        ...

    def evaluate(self, rows: RankRows) -> dict[str, float]:
        """Forward only: `loss` is the mean over these rows, the others sums, all over all ranks."""
        ...


@dataclass
class SupervisedParts:
    """What `runs/supervised_trainer.py` passes in."""

    orders: HeadOrders
    task: SupervisedTask
    rows_of_step: Callable[[int], RankRows]
    """Of the step at a version; collective."""
    rows_of_validation: Callable[[int, int], RankRows]
    """(first, count) validation examples; collective."""
    set_version: Callable[[int], None]


class SupervisedLearner:
    """Owns the engine on its own thread."""

    def __init__(self, parts: SupervisedParts, num_steps: int, version: int) -> None:
        self.parts, self.num_steps, self.version = parts, num_steps, version
        self.orders = parts.orders
        self.post, self.head = self.orders.parts.post, self.orders.parts.head
        self.engine, self.set_phase = self.orders.parts.engine, self.orders.parts.set_phase

    def run(self) -> str:
        """Until StopTrainer; returns its reason."""
        for message in self.orders.of_learner():
            match message:
                case Commit():
                    self.step(message)
                case Evaluate():
                    self.evaluate(message)
                case _:
                    raise AssertionError(f"the learner cannot handle {message!r}")
        return self.orders.outcome

    def step(self, commit: Commit) -> None:
        """Version + 1, whatever was left to train on; without any row nothing is touched, on all ranks alike."""
        if commit.version != self.version:
            raise AssertionError(f"{commit} at version {self.version}")
        began = time.monotonic()
        self.set_phase("reading rows")
        rows = self.parts.rows_of_step(commit.version)
        self.set_phase("training")
        self.engine.set_progress(self.version / max(self.num_steps, 1))
        found = dict(rows.figures)
        if rows.batches:
            found |= derive_figures(self.parts.task.train(rows), "train")
        else:
            logger.warning("step %d: no row of its batch trains", commit.version + 1)
            found["train/update_skipped"] = 1.0
        self.version = commit.version + 1
        self.parts.set_version(self.version)
        self.post.send(self.head, StepDone(self.version, time.monotonic() - began, found))

    def evaluate(self, message: Evaluate) -> None:
        """Sums, so that parts of an evaluation add up: `loss` is weighted by what it is a mean over."""
        rows = self.parts.rows_of_validation(message.first, message.count)
        sums = dict(rows.figures)
        if rows.batches:
            found = self.parts.task.evaluate(rows)
            weight = found["pairs"] if "pairs" in found else found["labels"]
            sums |= {**found, "loss": found["loss"] * weight, "weight": weight}
        self.post.send(self.head, EvaluationPart(message.version, message.first, sums))


def derive_figures(sums: Mapping[str, float], area: str) -> dict[str, float]:
    """Sums over pairs become means, under `area/…`."""
    pairs = max(sums.get("pairs", 0.0), 1.0)
    return {f"{area}/{name}": value if name in AS_THEY_ARE else value / pairs for name, value in sums.items()}
