"""The control loop of a run, on the head: straight-line code whose every wait pumps messages and admits groups.

    start      every role says Hello; after a resume the engines get the restored weights first; log-probs are compared
    gather     wait until the batch of this version is complete         <- rollout ranks publish shards
    train      plan -> all trainer ranks read their rows -> commit (or replace damaged groups and gather again)
               -> wait for StepDone                                     <- trainer ranks
    update     engines stop -> buckets stream -> engines go on              <- engines, trainer rank 0
               who has failed or does not answer in time is left out, and brought the version while the next batch is
               gathered, once it is there again
    intervals  checkpoint (written beside training), export, evaluation
    stop       everybody is told; the outcome is `finished` or `stopped` (resume it)

Rollout never waits for this loop but for admission and weights; the trainer waits in `gather` only. Each wait has a
reason, an age and the ranks that it waits for (shown in heartbeats and logs) and ends the run after
`cluster.progress_seconds` without progress. A full disk pauses admission instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.checkpoint_saves import CheckpointSaves
from pekoe.pipeline.control.disk_watch import DiskWatch
from pekoe.pipeline.control.evaluation import Evaluation
from pekoe.pipeline.control.group_table import OutstandingGroup
from pekoe.pipeline.control.logprob_gap import Gap
from pekoe.pipeline.control.parts import ControllerParts
from pekoe.pipeline.control.pump import Pump
from pekoe.pipeline.control.state_orders import StateOrders, is_due
from pekoe.pipeline.control.training import Training
from pekoe.pipeline.messages import (
    EQUAL_REWARDS,
    DiskRefused,
    EngineFailed,
    EngineRestored,
    Evaluated,
    Exported,
    Finished,
    Hello,
    LogprobsChecked,
    Message,
    PhaseReached,
    Present,
    Published,
    Rejected,
    RowsRead,
    Saved,
    StepDone,
    StopRollout,
    StopTrainer,
    Wake,
    WeightsLoaded,
    WeightsReady,
    WeightsSent,
    WeightsShared,
)

logger = logging.getLogger(__name__)

INBOX_KINDS: tuple[type[Message], ...] = (
    Hello, Finished, Published, Rejected, DiskRefused, Evaluated, RowsRead, StepDone, WeightsReady, WeightsSent,
    WeightsLoaded, WeightsShared, PhaseReached, Saved, Exported, Present, EngineFailed, EngineRestored,
    LogprobsChecked,
)  # fmt: skip
FINISHED, STOPPED = "finished", "stopped"
"""How a run ends: done, or to be resumed."""


class NothingToTrain(RuntimeError):
    """The data ended before a step could be made."""


class Controller:
    """Runs on its own thread on the head; owns the version of the run."""

    def __init__(self, config: RunConfig, parts: ControllerParts, num_steps: int, version: int) -> None:
        self.config, self.parts = config, parts
        self.num_steps, self.version = num_steps, version
        self.resumed = version > 0
        self.hello: dict[int, set[str]] = {}
        self.evaluation: Evaluation | None = None
        self.admitting = False
        self.catching_up = False
        """Engines that came back may be brought this version now: no step is under way."""
        self.disk = DiskWatch(config.cluster.full_disk_seconds)
        saves = CheckpointSaves(
            parts.post, parts.trainer_ranks, parts.checkpoints, self.disk, config.recover.max_failures,
            complete_version=version if version else -1,
        )  # fmt: skip
        self.evaluated_version = version if "evaluation" in parts.done_before else -1
        self.pump = Pump(
            parts.inbox, parts.set_phase, self.describe, parts.stacks_of, self._while_waiting, self.disk,
            config.cluster.progress_seconds, parts.stop.is_over, self._handlers(),
        )  # fmt: skip
        self.wait = self.pump.wait
        self.state = StateOrders(
            config, parts.post, parts.trainer_ranks, self.pump, saves, parts.stop, parts.dispatcher.state,
            parts.peer_failed, parts.report.saved, exported_version=version if "export" in parts.done_before else -1,
        )  # fmt: skip
        self.state.listen()
        parts.weights.listen(self.pump, parts.dispatcher.set_available)
        self.pump.handlers[EngineFailed] = self._on_engine_failed
        self.is_recorded = True
        """The last step is in the ledger: a checkpoint may rely on it."""
        self.training = Training(config, parts, self.pump)

    def run(self) -> str:
        """The whole run; returns `finished` or `stopped`."""
        self.wait(
            self._everybody_is_here, "roles to start", self.config.cluster.setup_seconds, self._who_is_missing,
            key="cluster.setup_seconds",
        )  # fmt: skip
        self.parts.report.begin()
        self.parts.stop.begin()
        if self.resumed and not self.parts.stop.requested():
            self.update_weights()
        if self.parts.start_check is not None and not self.parts.stop.requested():
            self.parts.start_check.available = self.parts.weights.roster.available
            self.parts.start_check.run(self.version, self.pump, self.parts.stop.requested)
        if self.resumed and not self.parts.stop.requested():
            self.at_intervals()
        if self.config.evaluator.at_start and self.version == 0:
            self.evaluate(self.config.evaluator.block)
        self.admitting = True
        while self.version < self.num_steps and not self.parts.stop.requested():
            batch = self.gather()
            if batch is None:
                self._check_early_end()
                break
            began, refusals = time.monotonic(), self.disk.count
            if not self.train(batch):
                continue
            stopping = self.parts.stop.requested()
            if not stopping:
                self.update_weights()
            if self.disk.count == refusals:
                self.parts.stop.step_seconds = max(self.parts.stop.step_seconds, time.monotonic() - began)
            self.parts.report.step(self)
            if not stopping:
                self.at_intervals()
        return self.finish()

    def gather(self) -> list[OutstandingGroup] | None:
        """Waits for the batch of this version, empty where all of its groups were dropped (`dynamic_batch_size`). None:
        a stop was asked for, or the data has ended."""
        began = time.monotonic()
        dispatcher = self.parts.dispatcher

        def complete() -> list[OutstandingGroup] | bool | None:
            want = dispatcher.want()
            if self.parts.stop.requested() or want == 0:
                return False
            if self.disk.is_full:
                self.state.save_if_wanted(self.version, is_due=False)
            dispatcher.drop_stale(self.version, time.monotonic() - began)
            chosen = dispatcher.table.choose(self.version, want)
            if chosen is None:
                dispatcher.flush(self.version, want)
            dispatcher.starve(chosen is None)
            self._share_weights()
            return chosen

        with self._catching_up():
            batch = self.wait(complete, f"the batch of version {self.version}", on=self._who_samples)
        self.parts.report.wait_seconds = time.monotonic() - began
        return batch if isinstance(batch, list) else None

    def train(self, batch: list[OutstandingGroup]) -> bool:
        """One step, recorded durably; of an empty batch it adds 1 to the version and nothing else. False: nothing was
        trained."""
        began = time.monotonic()
        rows = self.training.step(batch, self.version)
        if rows is None:
            return False
        self.version += 1
        losses = self.parts.dispatcher.consume(batch)
        self.is_recorded = self.pump.durably("the ledger", lambda: self.parts.record_step(self.version, rows, losses))
        stats = {**self.training.stats(), "version": float(self.version)}
        self.parts.report.trained(rows, stats, losses, time.monotonic() - began)
        return True

    def update_weights(self) -> None:
        """Every engine goes on with this version; a stop gives up one that waits for room on the disk."""
        began = time.monotonic()
        gap, stood_still = Gap(), 0.0
        if self.parts.rollout_ranks:
            if self.parts.colocated:
                self._wake(self.parts.weights.roster.down())
            stood_still = self.parts.weights.bring(self.version, self.pump, self.parts.stop.requested)
            gap = self.parts.weights.logprob_gap()
        self._share_weights()
        self.parts.report.updated(gap, time.monotonic() - began, stood_still)

    def _share_weights(self) -> None:
        """At a step boundary: this version goes to disk for attached worlds, beside training."""
        if self.parts.attached is not None:
            self.parts.attached.weights.bring(self.version)

    def at_intervals(self) -> None:
        """Checkpoint, export and evaluation that are due at this version."""
        self.state.save_if_wanted(self.version, is_due(self.config.recover.freq_steps, self.version))
        if is_due(self.config.saver.freq_steps, self.version):
            self.state.export(self.version)
        if is_due(self.config.evaluator.freq_steps, self.version) and self.version < self.num_steps:
            self.evaluate(self.config.evaluator.block)

    def evaluate(self, block: bool) -> None:
        """Starts an evaluation; `block` waits for it, with nothing else running, so that one version is measured.

        One that a stop gives up is not repeated on resume, unless it was of the version that the run stopped at.
        """
        if not self.parts.num_validation or self.evaluated_version == self.version:
            return
        self._await_evaluation("the last evaluation")
        if self.parts.stop.requested():
            return
        self.evaluated_version = self.version
        self.evaluation = Evaluation(
            self.version, self.parts.num_validation, (self.config.eval_gconfig or self.config.gconfig).n_samples,
            self._who_can_sample(), self.parts.post,
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
        with self._catching_up():
            self.wait(
                lambda: (self.evaluation is None or self.evaluation.is_complete or self.parts.stop.requested()) or None,
                reason, on=lambda: self.parts.rollout_leaders,
            )  # fmt: skip
        self._end_evaluation()

    def finish(self) -> str:
        """Checkpoint, export, last evaluation (after a stop the checkpoint only); then everybody is told to stop."""
        self.admitting = False
        if self.is_recorded:
            self.state.save_at_last(self.version)
        else:
            logger.error("step %d is not in the ledger for lack of room: it will be done again", self.version)
        if not self.parts.stop.requested():
            if self.config.saver.at_end:
                self.state.export(self.version)
            self._await_evaluation("the last evaluation")
            if self.config.evaluator.at_end:
                self.evaluate(block=True)
        outcome = STOPPED if self.parts.stop.requested() else FINISHED
        if outcome == FINISHED:
            losses = self.parts.dispatcher.take_losses()
            if not self.pump.durably("the ledger", lambda: self.parts.record_end(self.version, losses)):
                outcome = STOPPED
        for rank in self.parts.rollout_ranks:
            self.parts.post.send(rank, StopRollout(outcome))
        self.state.tell(StopTrainer(outcome))
        return outcome

    def _while_waiting(self) -> None:
        self.parts.stop.listen()
        if self.admitting and not self.disk.is_full:
            self.parts.dispatcher.admit_all()
        if self.parts.attached is not None and self.parts.attached.is_alone():
            self.pump.last_progress = time.monotonic()
        if self.catching_up and self.parts.rollout_ranks and not self.parts.stop.requested():
            self.parts.weights.catch_up(self.version, self.pump)
        self.parts.report.progress(self)

    def describe(self) -> str:
        """What is outstanding, for logs and errors."""
        table = self.parts.dispatcher.table
        oldest = table.oldest()
        away = self.parts.weights.roster.describe()
        age = f", oldest group {oldest.number} on rank {oldest.rank}" if oldest else ""
        return (
            f"version {self.version}, {self.parts.dispatcher.admission.running} groups running, "
            f"{len(table.ready)} ready{age}, {self.training.describe()}{away and ', '}{away}"
        )

    def _handlers(self) -> dict[type[Message], Callable[[int, Any], None]]:
        dispatcher = self.parts.dispatcher
        return {
            Finished: lambda source, message: dispatcher.on_finished(message, source),
            Published: self._on_published,
            Rejected: lambda source, message: dispatcher.on_rejected(message),
            DiskRefused: lambda source, message: self.disk.refuse(f"a shard of rank {source}", message.reason),
            Evaluated: self._on_evaluated,
            Hello: lambda source, message: self.hello.setdefault(source, set()).add(message.role),
            WeightsShared: self._on_weights_shared,
        }

    @contextmanager
    def _catching_up(self) -> Iterator[None]:
        self.catching_up = True
        try:
            yield
        finally:
            self.catching_up = False

    def _on_engine_failed(self, source: int, message: EngineFailed) -> None:
        """Colocated: outside of steps the device is the engine's, to be built anew on."""
        self.parts.weights.on_failed(source, message)
        if self.parts.colocated and not self.training.engines_rest:
            self._wake([source])

    def _wake(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.parts.post.send(rank, Wake(self.version))

    def _who_can_sample(self) -> Sequence[int]:
        """Ranks whose engines serve; all of them while none does."""
        return self.parts.weights.roster.available() or self.parts.rollout_leaders

    def _on_weights_shared(self, source: int, message: WeightsShared) -> None:
        assert self.parts.attached is not None
        self.parts.attached.weights.on_shared(message, self.disk)

    def _on_published(self, source: int, message: Published) -> None:
        self.disk.accept(f"a shard of rank {source}")
        self.parts.dispatcher.on_published(message)

    def _on_evaluated(self, source: int, message: Evaluated) -> None:
        if self.evaluation is not None:
            self.evaluation.on_evaluated(source, message)
            if self.evaluation.is_complete and self.admitting:
                self._end_evaluation()

    def _who_samples(self) -> list[int]:
        """Ranks of this world that groups are on."""
        return [rank for rank in self.parts.dispatcher.table.busy_ranks() if rank >= 0]

    def _check_early_end(self) -> None:
        """The data ended before the steps did: normal when groups were filtered, an error if no step was ever made."""
        if self.parts.stop.requested():
            return
        counts = dict(self.parts.dispatcher.counts)
        if self.version == 0:
            hint = "look at what the workflow returns"
            if counts.get("rejected_too_long"):
                hint = "prompts leave no room: raise gconfig.max_tokens, or take a model with a longer context"
            elif counts.get(f"rejected_{EQUAL_REWARDS}"):
                hint = "rollout.dynamic_sampling drops groups whose rewards are all equal: look at the reward"
            raise NothingToTrain(
                f"the data ended before a step could be made: every group was filtered or skipped ({counts}); {hint}"
            )
        logger.warning("the data ended after %d of %d steps (%s)", self.version, self.num_steps, counts)

    def _everybody_is_here(self) -> bool | None:
        return not self._who_is_missing() or None

    def _who_is_missing(self) -> list[int]:
        trainers = [rank for rank in self.parts.trainer_ranks if "trainer" not in self.hello.get(rank, ())]
        return trainers + [rank for rank in self.parts.rollout_ranks if "rollout" not in self.hello.get(rank, ())]

    def _end_evaluation(self) -> None:
        evaluation, self.evaluation = self.evaluation, None
        if evaluation is not None and evaluation.is_complete:
            self.parts.report.evaluated(evaluation)
