"""The control loop of a run, on the head: straight-line code whose every wait pumps messages and admits groups.

    start      every role says Hello; after a resume the engines get the restored weights first
    gather     wait until the batch of this version is complete         <- rollout ranks publish shards
    train      plan -> all trainer ranks read their rows -> commit (or replace damaged groups and gather again)
               -> wait for StepDone                                     <- trainer ranks
    update     engines stop at a token -> buckets stream -> engines go on  <- engines, trainer rank 0
    intervals  checkpoint, export, evaluation
    stop       everybody is told; the outcome is `finished` or `signal`

Rollout never waits for this loop but for admission and weights; the trainer waits in `gather` only. Each wait has a
reason and an age (shown in heartbeats and logs) and ends the run after `cluster.progress_seconds` without progress.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.dispatcher import Dispatcher, Losses
from pekoe.pipeline.control.evaluation import Evaluation
from pekoe.pipeline.control.group_table import OutstandingGroup
from pekoe.pipeline.control.step import PlanRows, ScoreRows, StepRows, make_plans, score_batch
from pekoe.pipeline.control.step_report import StepReport
from pekoe.pipeline.control.weight_update import WeightUpdateError, WeightUpdates
from pekoe.pipeline.messages import (
    Commit,
    Evaluated,
    Export,
    Exported,
    Finished,
    Hello,
    Inbox,
    Message,
    Phase,
    PhaseReached,
    Post,
    Published,
    Rejected,
    Replan,
    RowsRead,
    Save,
    Saved,
    StepDone,
    StopRollout,
    StopTrainer,
    Wake,
    WeightsLoaded,
    WeightsReady,
    WeightsSent,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

INBOX_KINDS: tuple[type[Message], ...] = (
    Hello, Finished, Published, Rejected, Evaluated, RowsRead, StepDone, WeightsReady, WeightsSent, WeightsLoaded,
    PhaseReached, Saved, Exported,
)  # fmt: skip
MAX_TRANSFER_TRIES = 3
DRAIN = 2000
"""Messages handled before the loop looks at its conditions again."""


class NoProgress(RuntimeError):
    """A wait outlived its limit."""


class NothingToTrain(RuntimeError):
    """The data ended before a step could be made."""


class CheckpointFailure(RuntimeError):
    """The last checkpoint of an attempt could not be written: what came after the one before is not safe."""


@dataclass
class ControllerParts:
    """What `runs/rl_head.py` passes in: the other stages, as plain functions and objects."""

    post: Post
    inbox: Inbox
    trainer_ranks: Sequence[int]
    rollout_ranks: Sequence[int]
    colocated: bool
    dispatcher: Dispatcher
    weights: WeightUpdates
    score: ScoreRows
    plan_rows: PlanRows
    num_validation: int
    record_step: Callable[[int, StepRows, Losses], None]
    """Writes the ledger: what the step that made this version consumed, and what was lost since the last one."""
    record_end: Callable[[int, Losses], None]
    """Writes the ledger: what was lost after the last step."""
    done_before: frozenset[str]
    """Of a resumed run: which of `export` and `evaluation` exist at the version it begins at."""
    quarantine: Callable[[str, str], None]
    begin_checkpoint: Callable[[int], object]
    commit_checkpoint: Callable[[int], None]
    abandon_checkpoint: Callable[[int], None]
    report: StepReport
    stop_requested: Callable[[], bool]
    set_phase: Callable[[str], None]


class Controller:
    """Runs on its own thread on the head; owns the version of the run."""

    def __init__(self, config: RunConfig, parts: ControllerParts, num_steps: int, version: int) -> None:
        self.config, self.parts = config, parts
        self.num_steps, self.version = num_steps, version
        self.resumed = version > 0
        self.hello: dict[int, set[str]] = {}
        self.phase_reached: set[int] = set()
        self.rows_read: dict[int, RowsRead] = {}
        self.steps_done: dict[int, StepDone] = {}
        self.saved: dict[int, Saved] = {}
        self.exported: set[str] = set()
        self.evaluation: Evaluation | None = None
        self.admitting = False
        self.waiting_for = "start"
        self.saved_version = version if version else -1
        self.exported_version = version if "export" in parts.done_before else -1
        self.evaluated_version = version if "evaluation" in parts.done_before else -1
        self.round = 0
        self.last_progress = time.monotonic()

    def run(self) -> str:
        """The whole run; returns `finished` or `signal`."""
        self.wait(self._everybody_is_here, "roles to start", self.config.cluster.setup_seconds)
        self.parts.report.begin()
        if self.resumed:
            self.update_weights()
            self.at_intervals()
        if self.config.evaluator.at_start and self.version == 0:
            self.evaluate(self.config.evaluator.block)
        self.admitting = True
        while self.version < self.num_steps and not self.parts.stop_requested():
            batch = self.gather()
            if not batch:
                self._check_early_end()
                break
            if not self.train(batch):
                continue
            stopping = self.parts.stop_requested()
            if not stopping:
                self.update_weights()
            self.parts.report.step(self)
            if not stopping:
                self.at_intervals()
        return self.finish()

    def gather(self) -> list[OutstandingGroup] | None:
        """Waits for the batch of this version. None: a stop was asked for, or the data has ended."""
        began = time.monotonic()
        dispatcher = self.parts.dispatcher

        def complete() -> list[OutstandingGroup] | bool | None:
            want = dispatcher.want()
            if self.parts.stop_requested() or want == 0:
                return False
            dispatcher.drop_stale(self.version, time.monotonic() - began)
            chosen = dispatcher.table.choose(self.version, want)
            if chosen is None:
                dispatcher.flush(self.version, want)
            return chosen

        batch = self.wait(complete, f"the batch of version {self.version}")
        self.parts.report.wait_seconds = time.monotonic() - began
        return batch if isinstance(batch, list) else None

    def train(self, batch: list[OutstandingGroup]) -> bool:
        """One step. False: some rows were damaged; their groups are issued again and nothing was trained."""
        if self.parts.colocated:
            self._rest_engines()
        began = time.monotonic()
        rows = score_batch(batch, self.parts.score)
        self._check_staleness(batch)
        self.rows_read.clear()
        self.steps_done.clear()
        for rank, plan in zip(
            self.parts.trainer_ranks, make_plans(rows, self.parts.plan_rows, self.version, self.round), strict=True
        ):
            self.parts.post.send(rank, plan)
        self.wait(lambda: len(self.rows_read) == len(self.parts.trainer_ranks) or None, "trainer ranks to read rows")
        bad = [entry for message in self.rows_read.values() for entry in message.bad]
        if bad or self.parts.stop_requested():
            self._call_off(bad)
            return False
        self._tell_trainers(Commit(self.version, self.round))
        self.wait(lambda: len(self.steps_done) == len(self.parts.trainer_ranks) or None, "the training step")
        self.version += 1
        self.round = 0
        losses = self.parts.dispatcher.consume(batch)
        self.parts.record_step(self.version, rows, losses)
        stats = {**self.steps_done[self.parts.trainer_ranks[0]].stats, "version": float(self.version)}
        self.parts.report.trained(rows, stats, losses, time.monotonic() - began)
        return True

    def update_weights(self) -> None:
        """Brings every engine to this version; a failed transfer is tried again in a new group."""
        weights = self.parts.weights
        began = time.monotonic()
        limits = self.config.weights
        for attempt in range(MAX_TRANSFER_TRIES):
            weights.prepare(self.version)
            self.wait(lambda: weights.all_ready or None, "engines to stop at a token", limits.ready_seconds)
            weights.publish()
            self.wait(lambda: weights.is_over or None, f"weights of version {self.version} to arrive")
            errors = weights.errors()
            if not errors:
                break
            logger.warning("transfer of version %d failed (try %d): %s", self.version, attempt + 1, "; ".join(errors))
        else:
            raise WeightUpdateError(f"version {self.version} could not be brought to the engines: {'; '.join(errors)}")
        gap = weights.logprob_gap()
        stood_still = max(message.seconds for message in weights.loaded.values())
        self.parts.report.updated(gap, time.monotonic() - began, stood_still)

    def at_intervals(self) -> None:
        """Checkpoint, export and evaluation that are due at this version."""
        if _is_due(self.config.recover.freq_steps, self.version):
            self.checkpoint()
        if _is_due(self.config.saver.freq_steps, self.version):
            self.export()
        if _is_due(self.config.evaluator.freq_steps, self.version) and self.version < self.num_steps:
            self.evaluate(self.config.evaluator.block)

    def checkpoint(self) -> None:
        """Every trainer rank writes its part, then the head commits: complete or nothing."""
        if self.saved_version == self.version:
            return
        self.saved.clear()
        self.parts.begin_checkpoint(self.version)
        state = msgspec.msgpack.encode({"version": self.version, **self.parts.dispatcher.state()})
        for rank in self.parts.trainer_ranks:
            self.parts.post.send(rank, Save(self.version, state if rank == self.parts.post.rank else b""))
        self.wait(lambda: len(self.saved) == len(self.parts.trainer_ranks) or None, "the checkpoint")
        errors = [m.error for m in self.saved.values() if m.error]
        if errors:
            logger.error("checkpoint of version %d failed: %s", self.version, "; ".join(errors))
            self.parts.abandon_checkpoint(self.version)
            return
        self.parts.commit_checkpoint(self.version)
        self.saved_version = self.version

    def export(self) -> None:
        """A Hugging Face folder of this version."""
        if self.exported_version == self.version:
            return
        path = f"exports/step-{self.version}"
        self._tell_trainers(Export(self.version, path))
        self.wait(lambda: path in self.exported or None, "the export")
        self.exported_version = self.version

    def evaluate(self, block: bool) -> None:
        """Starts an evaluation; `block` waits for it, with nothing else running, so that one version is measured.

        One that a stop gives up is not repeated on resume, unless it was of the version that the run stopped at.
        """
        if not self.parts.num_validation or self.evaluated_version == self.version:
            return
        self._await_evaluation("the last evaluation")
        if self.parts.stop_requested():
            return
        self.evaluated_version = self.version
        self.evaluation = Evaluation(
            self.version, self.parts.num_validation, (self.config.eval_gconfig or self.config.gconfig).n_samples,
            self.parts.rollout_ranks, self.parts.post,
        )  # fmt: skip
        self.evaluation.begin()
        if block:
            admitting, self.admitting = self.admitting, False
            self._await_evaluation(f"the evaluation of version {self.version}")
            self.admitting = admitting

    def _await_evaluation(self, reason: str) -> None:
        """Until the running evaluation is over, if there is one; a stop gives it up."""
        if self.evaluation is None:
            return
        self.wait(
            lambda: (self.evaluation is None or self.evaluation.is_complete or self.parts.stop_requested()) or None,
            reason,
        )
        self._end_evaluation()

    def finish(self) -> str:
        """Checkpoint, export, last evaluation (after a stop the checkpoint only); then everybody is told to stop."""
        self.admitting = False
        self.checkpoint()
        if self.saved_version != self.version:
            raise CheckpointFailure(
                f"the checkpoint of version {self.version} could not be written (the log says why); "
                f"--resume goes on from version {max(self.saved_version, 0)}"
            )
        if not self.parts.stop_requested():
            if self.config.saver.at_end:
                self.export()
            self._await_evaluation("the last evaluation")
            if self.config.evaluator.at_end:
                self.evaluate(block=True)
        outcome = "signal" if self.parts.stop_requested() else "finished"
        if outcome == "finished":
            self.parts.record_end(self.version, self.parts.dispatcher.take_losses())
        for rank in self.parts.rollout_ranks:
            self.parts.post.send(rank, StopRollout(outcome))
        self._tell_trainers(StopTrainer(outcome))
        return outcome

    def wait(self, until: Callable[[], T | None], reason: str, limit: float | None = None) -> T:
        """Pumps messages and admits groups until `until` gives something other than None."""
        self.waiting_for = reason
        self.parts.set_phase(f"waiting for {reason}")
        began = self.last_progress = time.monotonic()
        limit = limit or self.config.cluster.progress_seconds
        told = began + 60.0
        while True:
            if self.admitting:
                self.parts.dispatcher.admit_all()
            found = until()
            if found is not None:
                self.parts.set_phase("control")
                return found
            self._pump(0.1)
            now = time.monotonic()
            if now - self.last_progress > limit:
                raise NoProgress(f"waited {now - began:.0f} s for {reason}: {self.describe()}")
            if now > told:
                logger.warning("waiting for %s since %.0f s: %s", reason, now - began, self.describe())
                told = now + 60.0
            self.parts.report.progress(self)

    def describe(self) -> str:
        """What is outstanding, for logs and errors."""
        table = self.parts.dispatcher.table
        oldest = table.oldest()
        age = f", oldest group {oldest.number} on rank {oldest.rank}" if oldest else ""
        return (
            f"version {self.version}, {self.parts.dispatcher.admission.running} groups running, "
            f"{len(table.ready)} ready{age}, rows read by ranks {sorted(self.rows_read)}, "
            f"steps done by ranks {sorted(self.steps_done)}"
        )

    def _pump(self, timeout: float) -> None:
        """Handles what has arrived; waits up to `timeout` for the first message."""
        try:
            source, message = self.parts.inbox.get(timeout=timeout)
        except queue.Empty:
            return
        self.last_progress = time.monotonic()
        for _ in range(DRAIN):
            self._handle(source, message)
            try:
                source, message = self.parts.inbox.get_nowait()
            except queue.Empty:
                return
        self._handle(source, message)

    def _handle(self, source: int, message: Message) -> None:
        match message:
            case Finished():
                self.parts.dispatcher.on_finished(message)
            case Published():
                self.parts.dispatcher.on_published(message)
            case Rejected():
                self.parts.dispatcher.on_rejected(message)
            case RowsRead():
                if (message.version, message.round) == (self.version, self.round):
                    self.rows_read[source] = message
            case StepDone():
                self.steps_done[source] = message
            case WeightsReady():
                self.parts.weights.on_ready(source, message)
            case WeightsSent():
                self.parts.weights.on_sent(message)
            case WeightsLoaded():
                self.parts.weights.on_loaded(source, message)
            case Evaluated():
                if self.evaluation is not None:
                    self.evaluation.on_evaluated(source, message)
                    if self.evaluation.is_complete and self.admitting:
                        self._end_evaluation()
            case PhaseReached():
                self.phase_reached.add(source)
            case Saved():
                self.saved[source] = message
            case Exported():
                self.exported.add(message.path)
            case Hello():
                self.hello.setdefault(source, set()).add(message.role)
            case _:
                raise AssertionError(f"the controller cannot handle {message!r}")

    def _check_early_end(self) -> None:
        """The data ended before the steps did: normal when groups were filtered, an error if no step was ever made."""
        if self.parts.stop_requested():
            return
        counts = dict(self.parts.dispatcher.counts)
        if self.version == 0:
            hint = "look at what the workflow returns"
            if counts.get("rejected_too_long"):
                hint = "prompts leave no room: raise gconfig.max_tokens, or take a model with a longer context"
            raise NothingToTrain(
                f"the data ended before a step could be made: every group was filtered or skipped ({counts}); {hint}"
            )
        logger.warning("the data ended after %d of %d steps (%s)", self.version, self.num_steps, counts)

    def _everybody_is_here(self) -> bool | None:
        trainers = all("trainer" in self.hello.get(rank, ()) for rank in self.parts.trainer_ranks)
        return (trainers and all("rollout" in self.hello.get(rank, ()) for rank in self.parts.rollout_ranks)) or None

    def _rest_engines(self) -> None:
        """Colocated: the engines stop at a token and give their devices to the trainer."""
        self.phase_reached.clear()
        for rank in self.parts.rollout_ranks:
            self.parts.post.send(rank, Phase(self.version))
        self.wait(lambda: len(self.phase_reached) == len(self.parts.rollout_ranks) or None, "engines to rest")

    def _call_off(self, bad: Sequence[tuple[str, int, str]]) -> None:
        """Before the commit nothing has happened yet: damaged shards are set aside, the plan is forgotten."""
        for shard, reason in {shard: reason for shard, _, reason in bad}.items():
            self.parts.quarantine(shard, reason)
            self.parts.dispatcher.replace_shard(shard)
        self._tell_trainers(Replan(self.version, self.round))
        self.round += 1
        if self.parts.colocated:
            for rank in self.parts.rollout_ranks:
                self.parts.post.send(rank, Wake(self.version))

    def _check_staleness(self, batch: Sequence[OutstandingGroup]) -> None:
        eta = self.config.rollout.max_head_offpolicyness
        if eta is None:
            return
        oldest = min(row.min_version for group in batch for row in group.rows)
        if self.version - oldest > eta:
            raise AssertionError(f"a token of version {oldest} reached the step at {self.version}; eta is {eta}")

    def _end_evaluation(self) -> None:
        evaluation, self.evaluation = self.evaluation, None
        if evaluation is not None and evaluation.is_complete:
            self.parts.report.evaluated(evaluation)

    def _tell_trainers(self, message: Message) -> None:
        for rank in self.parts.trainer_ranks:
            self.parts.post.send(rank, message)


def _is_due(interval: int | None, version: int) -> bool:
    return interval is not None and version % interval == 0
