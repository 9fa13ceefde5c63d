"""The control loop of a supervised run, on the head: straight-line code whose every wait pumps messages.

    start      every trainer rank says Hello
    step       Commit -> all trainer ranks work out the rows and train -> StepDone
    intervals  checkpoint (written beside training), export, evaluation
    stop       a checkpoint if there is time, then everybody is told; the outcome is `finished` or `stopped` (resume it)

Each wait has a reason, an age and the ranks that it waits for, and ends the run after `cluster.progress_seconds`
without progress. A full disk pauses the run instead: no step begins until what was refused is written, or
`cluster.full_disk_seconds` are over. A stop is obeyed at the next boundary: of a step, or of a part of an evaluation,
which it gives up; it ends a pause, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.checkpoint_saves import CheckpointFiles, CheckpointSaves
from pekoe.pipeline.control.disk_watch import DiskWatch
from pekoe.pipeline.control.pump import Pump
from pekoe.pipeline.control.state_orders import StateOrders, is_due
from pekoe.pipeline.control.stop_watch import StopWatch
from pekoe.pipeline.control.supervised_report import SupervisedReport
from pekoe.pipeline.messages import (
    Commit,
    Evaluate,
    EvaluationPart,
    Exported,
    Hello,
    Inbox,
    Message,
    Post,
    Present,
    Saved,
    StepDone,
    StopTrainer,
)
from pekoe.pipeline.observe.phases import SetPhase

logger = logging.getLogger(__name__)

INBOX_KINDS: tuple[type[Message], ...] = (Hello, StepDone, EvaluationPart, Saved, Exported, Present)
FINISHED, STOPPED = "finished", "stopped"
"""How a run ends: done, or to be resumed."""


@dataclass
class ControlParts:
    """What `runs/supervised_head.py` passes in."""

    post: Post
    inbox: Inbox
    """Of INBOX_KINDS; `Committed` comes there, too."""
    trainer_ranks: Sequence[int]
    num_validation: int
    """Examples; 0: nothing is evaluated."""
    done_before: frozenset[str]
    """Of a resumed run: which of `export` and `evaluation` exist at the version it begins at."""
    checkpoints: CheckpointFiles
    report: SupervisedReport
    stop: StopWatch
    peer_failed: Callable[[], bool]
    stacks_of: Callable[[Sequence[int]], dict[int, str]]
    set_phase: SetPhase


class SupervisedController:
    """Runs on its own thread on the head; owns the version of the run."""

    def __init__(self, config: RunConfig, parts: ControlParts, num_steps: int, version: int) -> None:
        self.config, self.parts = config, parts
        self.num_steps, self.version = num_steps, version
        self.resumed = version > 0
        self.here: set[int] = set()
        self.steps_done: dict[int, StepDone] = {}
        self.evaluated: dict[int, EvaluationPart] = {}
        self.evaluated_version = version if "evaluation" in parts.done_before else -1
        self.disk = DiskWatch(config.cluster.full_disk_seconds)
        saves = CheckpointSaves(
            parts.post, parts.trainer_ranks, parts.checkpoints, self.disk, config.recover.max_failures,
            complete_version=version if version else -1,
        )  # fmt: skip
        self.pump = Pump(
            parts.inbox, parts.set_phase, self.describe, parts.stacks_of, self._while_waiting, self.disk,
            config.cluster.progress_seconds, parts.stop.is_over,
        )  # fmt: skip
        self.state = StateOrders(
            config, parts.post, parts.trainer_ranks, self.pump, saves, parts.stop, parts.report.snapshot,
            parts.peer_failed, parts.report.saved, exported_version=version if "export" in parts.done_before else -1,
        )  # fmt: skip
        self.state.listen()
        self.pump.handlers.update(
            {
                Hello: lambda source, message: self.here.add(source),
                StepDone: self.steps_done.__setitem__,
                EvaluationPart: self.evaluated.__setitem__,
            }
        )

    def run(self) -> str:
        """The whole run; returns `finished` or `stopped`."""
        stop = self.parts.stop
        self.pump.wait(
            lambda: len(self.here) == len(self.parts.trainer_ranks) or None, "roles to start",
            self.config.cluster.setup_seconds, lambda: self.state.without(self.here), key="cluster.setup_seconds",
        )  # fmt: skip
        self.parts.report.begin()
        stop.begin()
        if self.resumed and not stop.requested():
            self.at_intervals()
        if self.config.evaluator.at_start and self.version == 0:
            self.evaluate()
        while self.version < self.num_steps and self._may_go_on():
            self.step()
            if not stop.requested():
                self.at_intervals()
        return self.finish()

    def step(self) -> None:
        """One step on all trainer ranks, then its figures."""
        began, refusals = time.monotonic(), self.disk.count
        self.steps_done.clear()
        self.state.tell(Commit(self.version, 0))
        self._wait_for_all(self.steps_done, "the training step")
        self.version += 1
        if self.disk.count == refusals:
            self.parts.stop.step_seconds = max(self.parts.stop.step_seconds, time.monotonic() - began)
        if self.disk.count:
            self.parts.report.figures["disk/refusals"] = float(self.disk.count)
        if self.state.saves.failures:
            self.parts.report.figures["checkpoint/failures"] = float(self.state.saves.failures)
        self.parts.report.step(self.version, self.steps_done[self.parts.trainer_ranks[0]])

    def at_intervals(self) -> None:
        """Checkpoint, export and evaluation that are due at this version."""
        self.state.save_if_wanted(self.version, is_due(self.config.recover.freq_steps, self.version))
        if is_due(self.config.saver.freq_steps, self.version):
            self.state.export(self.version)
        if is_due(self.config.evaluator.freq_steps, self.version) and self.version < self.num_steps:
            self.evaluate()

    def evaluate(self) -> None:
        """All validation examples, part by part; a stop gives the evaluation up, and a resumed run makes it again if it
        is of the version that the run stopped at."""
        if not self.parts.num_validation or self.evaluated_version == self.version:
            return
        began = time.monotonic()
        size = self.config.train_dataset.batch_size
        sums: dict[str, float] = {}
        for first in range(0, self.parts.num_validation, size):
            if self.parts.stop.requested():
                return
            part = time.monotonic()
            self.evaluated.clear()
            self.state.tell(Evaluate(self.version, first, min(size, self.parts.num_validation - first)))
            self._wait_for_all(self.evaluated, f"the evaluation of version {self.version}")
            for name, value in self.evaluated[self.parts.trainer_ranks[0]].sums.items():
                sums[name] = sums.get(name, 0.0) + value
            self.parts.stop.step_seconds = max(self.parts.stop.step_seconds, time.monotonic() - part)
        self.evaluated_version = self.version
        self.parts.report.evaluated(self.version, sums, time.monotonic() - began)

    def finish(self) -> str:
        """Checkpoint, export, last evaluation (after a stop the checkpoint only); then everybody is told to stop."""
        self.state.save_at_last(self.version)
        if not self.parts.stop.requested():
            if self.config.saver.at_end:
                self.state.export(self.version)
            if self.config.evaluator.at_end:
                self.evaluate()
        outcome = STOPPED if self.parts.stop.requested() else FINISHED
        self.state.tell(StopTrainer(outcome))
        return outcome

    def describe(self) -> str:
        """Where the run is, for logs and errors."""
        return f"version {self.version} of {self.num_steps}"

    def _may_go_on(self) -> bool:
        """Before a step: waits while there is no room on the disk, and tries the checkpoint that was refused again.
        False: a stop was asked for."""

        def is_over() -> bool | None:
            if not self.disk.is_full or self.parts.stop.requested():
                return True
            self.state.save_if_wanted(self.version, is_due=False)
            return None

        if self.disk.is_full:
            self.pump.wait(is_over, "room on the disk", on=self.state.saves.missing)
        return not self.parts.stop.requested()

    def _wait_for_all(self, answers: dict[int, StepDone] | dict[int, EvaluationPart], reason: str) -> None:
        self.pump.wait(
            lambda: len(answers) == len(self.parts.trainer_ranks) or None,
            reason,
            on=lambda: self.state.without(answers),
        )

    def _while_waiting(self) -> None:
        self.parts.stop.listen()
        self.parts.report.progress(self.version, self.num_steps, self.pump.reason)
