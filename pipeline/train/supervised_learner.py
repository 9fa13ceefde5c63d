"""The loop of a supervised run: the same on every trainer rank, told by the head when to go on.

Commit     the rows of a step (an order that every rank works out for itself) -> one optimiser update -> StepDone
Evaluate   some validation examples, forward only -> EvaluationPart                          (collective, like a step)
Save       copy the state (collective); a saver thread writes it while training goes on, and answers Saved
Export     a Hugging Face folder (collective) -> Exported
RollCall   answer Present: this rank stands at a step boundary
StopTrainer                    leave, when the save in flight is over

No rank waits inside of a collective for anything but its peers' arithmetic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pekoe.pipeline import files
from pekoe.pipeline.messages import (
    Commit,
    Evaluate,
    EvaluationPart,
    Export,
    Exported,
    Inbox,
    Message,
    Post,
    Present,
    RollCall,
    Save,
    StepDone,
    StopTrainer,
)
from pekoe.pipeline.observe.phases import SetPhase
from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.checkpoint import ENGINE
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.saver import Saver, StagedSave

logger = logging.getLogger(__name__)

INBOX_KINDS: tuple[type[Message], ...] = (Commit, Evaluate, Save, Export, RollCall, StopTrainer)
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

    post: Post
    inbox: Inbox
    head: int
    engine: TrainEngine
    task: SupervisedTask
    rows_of_step: Callable[[int], RankRows]
    """Of the step at a version; collective."""
    rows_of_validation: Callable[[int, int], RankRows]
    """(first, count) validation examples; collective."""
    checkpoint_folder: Callable[[int], Path]
    other_files: Callable[[], dict[str, bytes]]
    start_thread: Callable[[str, Callable[[], None]], None]
    export_folder: Callable[[str], Path]
    set_phase: SetPhase
    set_version: Callable[[int], None]
    asynchronous: bool
    """Checkpoints are written beside training."""


class SupervisedLearner:
    """Owns the engine on its own thread."""

    def __init__(self, parts: SupervisedParts, num_steps: int, version: int) -> None:
        self.parts, self.num_steps, self.version = parts, num_steps, version
        self.num_handled = 0
        self.is_busy = False
        self.saver = Saver(parts.post, parts.head, parts.start_thread, parts.asynchronous)

    def progress(self) -> tuple[float, bool]:
        """(orders handled, one is being handled): for the watchdog."""
        return float(self.num_handled), self.is_busy

    def run(self) -> str:
        """Until StopTrainer; returns its reason."""
        while True:
            self.parts.set_phase("waiting for the head")
            self.is_busy = False
            _, message = self.parts.inbox.get()
            self.num_handled, self.is_busy = self.num_handled + 1, True
            self.parts.set_phase(type(message).__name__)
            match message:
                case Commit():
                    self.step(message)
                case Evaluate():
                    self.evaluate(message)
                case Save():
                    self.save(message)
                case Export():
                    self.export(message)
                case RollCall():
                    self.parts.post.send(self.parts.head, Present(message.number))
                case StopTrainer():
                    self._wait_for_saver()
                    return message.reason
                case _:
                    raise AssertionError(f"the learner cannot handle {message!r}")

    def step(self, commit: Commit) -> None:
        """Version + 1, whatever was left to train on; without any row nothing is touched, on all ranks alike."""
        if commit.version != self.version:
            raise AssertionError(f"{commit} at version {self.version}")
        began = time.monotonic()
        self.parts.set_phase("reading rows")
        rows = self.parts.rows_of_step(commit.version)
        self.parts.set_phase("training")
        self.parts.engine.set_progress(self.version / max(self.num_steps, 1))
        found = dict(rows.figures)
        if rows.batches:
            found |= derive_figures(self.parts.task.train(rows), "train")
        else:
            logger.warning("step %d: no row of its batch trains", commit.version + 1)
            found["train/update_skipped"] = 1.0
        self.version = commit.version + 1
        self.parts.set_version(self.version)
        self.parts.post.send(self.parts.head, StepDone(self.version, time.monotonic() - began, found))

    def evaluate(self, message: Evaluate) -> None:
        """Sums, so that parts of an evaluation add up: `loss` is weighted by what it is a mean over."""
        rows = self.parts.rows_of_validation(message.first, message.count)
        sums = dict(rows.figures)
        if rows.batches:
            found = self.parts.task.evaluate(rows)
            weight = found["pairs"] if "pairs" in found else found["labels"]
            sums |= {**found, "loss": found["loss"] * weight, "weight": weight}
        self.parts.post.send(self.parts.head, EvaluationPart(message.version, message.first, sums))

    def save(self, message: Save) -> None:
        """Copies this rank's part of a checkpoint and has it written; the head commits when all have answered.

        A save that is still in flight is waited for: there is one copy, and collectives keep their order.
        """
        began = time.monotonic()
        self._wait_for_saver()
        self.parts.set_phase("staging the checkpoint")
        staged = {ENGINE: self.parts.engine.stage()}
        others = self.parts.other_files()
        folder = self.parts.checkpoint_folder(message.version)
        stage_seconds = time.monotonic() - began
        self.saver.begin(StagedSave(message.version, folder, staged, others, began, stage_seconds))

    def export(self, message: Export) -> None:
        """A Hugging Face folder; without room for it nothing of it stays, and the head is told."""
        error = ""
        try:
            self.parts.engine.export_hf(self.parts.export_folder(message.path))
        except OSError as failure:
            if not files.is_full(failure):
                raise
            logger.exception("the export of version %d failed", message.version)
            error = str(failure)[:2000]
        if self.parts.post.rank == self.parts.head:
            self.parts.post.send(self.parts.head, Exported(message.version, message.path, error, bool(error)))

    def _wait_for_saver(self) -> None:
        if self.saver.is_busy:
            self.parts.set_phase("waiting for the last save to be written")
            self.saver.wait()


def derive_figures(sums: Mapping[str, float], area: str) -> dict[str, float]:
    """Sums over pairs become means, under `area/…`."""
    pairs = max(sums.get("pairs", 0.0), 1.0)
    return {f"{area}/{name}": value if name in AS_THEY_ARE else value / pairs for name, value in sums.items()}
