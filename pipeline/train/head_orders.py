"""The head's orders on a trainer rank: those that every kind of run has are carried out here, the others handed on.

Save      copy the state (collective); a saver thread writes it while training goes on, and answers Saved
Export    a Hugging Face folder (collective) -> Exported
RollCall  answer Present: this rank stands at a step boundary
StopTrainer                    leave, when the save in flight is over
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.messages import Export, Exported, Inbox, Message, Post, Present, RollCall, Save, StopTrainer
from pekoe.pipeline.observe.phases import SetPhase
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.saver import Saver, StagedSave

logger = logging.getLogger(__name__)

ORDERS: tuple[type[Message], ...] = (Save, Export, RollCall, StopTrainer)


@dataclass(frozen=True)
class OrderParts:
    """What `runs/trainer_setup.py` passes in."""

    post: Post
    inbox: Inbox
    """Of ORDERS and those of the learner."""
    head: int
    engine: TrainEngine
    """The one that is exported."""
    saved: Mapping[str, TrainEngine]
    """What a checkpoint holds, by its folder in it: the trained model, and the critic where there is one."""
    checkpoint_folder: Callable[[int], Path]
    """Where the checkpoint of a version is being put together; the same on all ranks."""
    other_files: Callable[[], dict[str, bytes]]
    """What belongs into a checkpoint beside the engines, by file name: this rank's random states as they are now."""
    start_thread: Callable[[str, Callable[[], None]], None]
    """Runs something beside the learner; what it raises ends the run."""
    export_folder: Callable[[str], Path]
    set_phase: SetPhase
    asynchronous: bool
    """Checkpoints are written beside training."""


class HeadOrders:
    """Belongs to the learner's thread."""

    def __init__(self, parts: OrderParts) -> None:
        self.parts = parts
        self.outcome = ""
        """Why the run ends, once it does."""
        self._num_taken = 0
        self._is_busy = False
        self.saver = Saver(parts.post, parts.head, parts.start_thread, parts.asynchronous)

    def progress(self) -> tuple[float, bool]:
        """(orders taken, one is being carried out): for the watchdog."""
        return float(self._num_taken), self._is_busy

    def of_learner(self) -> Iterator[Message]:
        """The orders that are the learner's to carry out, each before the next is taken; ends at StopTrainer."""
        while True:
            self.parts.set_phase("waiting for the head")
            self._is_busy = False
            _, message = self.parts.inbox.get()
            self._num_taken, self._is_busy = self._num_taken + 1, True
            self.parts.set_phase(type(message).__name__)
            match message:
                case Save():
                    self._save(message)
                case Export():
                    self._export(message)
                case RollCall():
                    self.parts.post.send(self.parts.head, Present(message.number))
                case StopTrainer():
                    self._wait_for_saver()
                    self.outcome = message.reason
                    return
                case _:
                    yield message

    def answer_from_first(self, message: Message) -> None:
        """Where all ranks have done the same the head's own tells it."""
        if self.parts.post.rank == self.parts.head:
            self.parts.post.send(self.parts.head, message)

    def _save(self, message: Save) -> None:
        """Copies this rank's part of a checkpoint and has it written; the head commits when all have answered.

        A save that is still in flight is waited for: there is one copy, and collectives keep their order.
        """
        began = time.monotonic()
        self._wait_for_saver()
        self.parts.set_phase("staging the checkpoint")
        staged = {name: engine.stage() for name, engine in self.parts.saved.items()}
        others = self.parts.other_files()
        folder = self.parts.checkpoint_folder(message.version)
        stage_seconds = time.monotonic() - began
        self.saver.begin(StagedSave(message.version, folder, staged, others, began, stage_seconds))

    def _export(self, message: Export) -> None:
        """Without room for it nothing of it stays, and the head is told."""
        error = ""
        try:
            self.parts.engine.export_hf(self.parts.export_folder(message.path))
        except OSError as failure:
            if not files.is_full(failure):
                raise
            logger.exception("the export of version %d failed", message.version)
            error = str(failure)[:2000]
        self.answer_from_first(Exported(message.version, message.path, error, bool(error)))

    def _wait_for_saver(self) -> None:
        if self.saver.is_busy:
            self.parts.set_phase("waiting for the last save to be written")
            self.saver.wait()
