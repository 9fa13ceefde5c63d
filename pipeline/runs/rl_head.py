"""The head of an RL run: wires the controller to data, ledger, shards, checkpoints, weights and metrics."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np

from pekoe.pipeline.algorithm.normalise import normalise_rewards
from pekoe.pipeline.algorithm.rewards import shape_rewards
from pekoe.pipeline.batch.plan import plan_batch
from pekoe.pipeline.control.controller import INBOX_KINDS, Controller, ControllerParts
from pekoe.pipeline.control.dispatcher import Dispatcher, Loss, Losses
from pekoe.pipeline.control.step import Assignment, StepRows
from pekoe.pipeline.control.step_report import StepReport
from pekoe.pipeline.control.weight_update import WeightUpdates
from pekoe.pipeline.data.cursor import Cursor
from pekoe.pipeline.observe.metrics import MetricsWriter, read_metrics
from pekoe.pipeline.observe.progress import Progress
from pekoe.pipeline.observe.report import report
from pekoe.pipeline.records import Float64, Int64, UInt8
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.context import RunContext
from pekoe.pipeline.runs.rl_trainer import CONTROLLER_STATE
from pekoe.pipeline.train.checkpoint import Checkpoints
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.trajectory.ledger import Entry, Ledger
from pekoe.pipeline.trajectory.store import Store
from pekoe.pipeline.weights.transport import WeightSender

logger = logging.getLogger(__name__)


def lead(
    context: RunContext, engine: TrainEngine, sender: WeightSender, checkpoints: Checkpoints, store: Store
) -> None:
    """The controller thread, until everybody was told to stop."""
    config, world, run = context.config, context.world, context.run
    version = context.start.version
    inbox = world.post.inbox(*INBOX_KINDS)
    data = context.data.training
    cursor = Cursor(len(data), config.seed, config.train_dataset.shuffle, config.total_train_epochs)
    dispatcher = Dispatcher(config, world.post, cursor, context.ranks.rollout_ranks, context.num_steps)
    ledger = Ledger(run)
    metrics = MetricsWriter(run, world.attempt, tensorboard=config.stats_logger.tensorboard)
    done_before: frozenset[str] = frozenset()
    if world.attempt > 0:
        go_back(context, cursor, dispatcher, ledger, store, metrics)
        done_before = done_at(run, version)
    context.add_gauges("control", dispatcher.gauges)
    progress = Progress(config.stats_logger.progress)
    validation = context.data.validation
    account = Account(ledger, store, checkpoints, dispatcher, config.rollout.keep_trajectories != "none")

    controller = Controller(
        config,
        ControllerParts(
            post=world.post,
            inbox=inbox,
            trainer_ranks=context.ranks.trainer_ranks,
            rollout_ranks=context.ranks.rollout_ranks,
            colocated=context.ranks.colocated,
            dispatcher=dispatcher,
            weights=WeightUpdates(
                world.post,
                context.ranks.trainer_ranks,
                context.ranks.rollout_ranks,
                sender.open_epoch,
                engine.weight_specs,
                config.rollout.logprob_gap_limit,
            ),
            score=lambda rewards, groups, samples, truncated: score_rows(context, rewards, groups, samples, truncated),
            plan_rows=lambda lengths, groups: plan_rows(context, lengths, groups),
            num_validation=0 if validation is None else len(validation),
            record_step=account.record_step,
            record_end=account.record_end,
            done_before=done_before,
            quarantine=lambda shard, reason: _quarantine(store, shard, reason),
            begin_checkpoint=checkpoints.begin,
            commit_checkpoint=account.commit_checkpoint,
            abandon_checkpoint=checkpoints.abandon,
            report=StepReport(metrics.write, progress.update),
            stop_requested=world.stop_requested.is_set,
            set_phase=context.phase_of("controller"),
        ),
        context.num_steps,
        version,
    )
    try:
        controller.run()
    finally:
        progress.close()
        metrics.close()
    try:
        print(report(run), flush=True)
    except Exception:
        logger.exception("the report could not be made; the run itself has ended well (pekoe report %s)", run.path)


class Account:
    """Keeps the ledger, and collects shards when a checkpoint covers what they held."""

    def __init__(
        self, ledger: Ledger, store: Store, checkpoints: Checkpoints, dispatcher: Dispatcher, keep_shards: bool
    ) -> None:
        self._ledger, self._store, self._checkpoints, self._dispatcher = ledger, store, checkpoints, dispatcher
        self._keep_shards = keep_shards
        self._consumed_from: set[str] = set()

    def record_step(self, version: int, rows: StepRows, losses: Losses) -> None:
        """Durable before anything relies on it."""
        consumed = [
            Entry(group.number, group.try_number, group.shard, tuple(row.row for row in group.rows))
            for group in rows.groups
        ]
        self._ledger.record(
            version, consumed=consumed, filtered=_entries(losses.filtered), skipped=_entries(losses.skipped)
        )
        self._consumed_from.update(entry.shard for entry in consumed)

    def record_end(self, version: int, losses: Losses) -> None:
        self._ledger.record_end(version, _entries(losses.filtered), _entries(losses.skipped))

    def commit_checkpoint(self, version: int) -> None:
        """Complete or nothing; then the shards that nobody needs any more are deleted."""
        self._checkpoints.commit(version)
        self._checkpoints.prune()
        if self._keep_shards:
            return
        spent = self._consumed_from - self._dispatcher.table.shards()
        self._store.collect(sorted(spent))
        self._consumed_from -= spent


def go_back(
    context: RunContext, cursor: Cursor, dispatcher: Dispatcher, ledger: Ledger, store: Store, metrics: MetricsWriter
) -> None:
    """A later attempt: what lies after its start point is set aside, open groups and usable shards come back."""
    version = context.start.version
    ledger.set_aside_after(version)
    metrics.truncate_after(version)
    for folder in run_exports_after(context.run, version):
        context.run.put_aside(folder, f"the run went on from version {version}")
    kept: set[str] = set()
    consumed = {entry.shard for record in ledger.read(version) for entry in record.consumed}
    if context.start.checkpoint:
        state = msgspec.msgpack.decode((Path(context.start.checkpoint) / CONTROLLER_STATE).read_bytes())
        cursor.restore(state["cursor"])
        dispatcher.restore(state, version)
        kept = dispatcher.adopt(store.adoptable(version), version)
    if context.config.rollout.keep_trajectories != "none":
        kept |= consumed
    else:
        store.collect(sorted(consumed - kept))
    store.set_aside_unknown(context.world.attempt, kept)
    logger.info("attempt %d goes on from version %d with %d shards", context.world.attempt, version, len(kept))


def run_exports_after(run: RunDirectory, version: int) -> list[Path]:
    """Exports of a future that was abandoned."""
    found = {path: path.name.removeprefix("step-") for path in run.exports.glob("step-*")}
    return [path for path, step in found.items() if step.isdigit() and int(step) > version]


def done_at(run: RunDirectory, version: int) -> frozenset[str]:
    """What an earlier attempt has finished at the version that this one begins at."""
    done = set()
    if (run.exports / f"step-{version}").is_dir():
        done.add("export")
    if any(line.step == version and "eval/accuracy" in line.values for line in read_metrics(run)):
        done.add("evaluation")
    return frozenset(done)


def score_rows(
    context: RunContext, rewards: Float64, groups: Int64, samples: Int64, truncated: UInt8
) -> tuple[Float64, UInt8]:
    """Rewards of the whole batch -> one advantage a row, and which rows train."""
    actor = context.config.actor
    trains = np.ones(len(rewards), dtype=np.uint8)
    if actor.mask_truncated:
        trains = (1 - truncated).astype(np.uint8)
    shaped = shape_rewards(rewards, actor.reward_bias, actor.reward_scaling, actor.reward_clip)
    return normalise_rewards(shaped, groups, samples, actor.reward_norm, trains.astype(bool)), trains


def plan_rows(context: RunContext, lengths: Int64, groups: Int64) -> Assignment:
    """Rows -> trainer ranks, minibatches and micro-batches under the token budget."""
    actor = context.config.actor
    return plan_batch(
        lengths,
        groups,
        len(context.ranks.trainer_ranks),
        actor.mb_spec.max_tokens_per_mb,
        actor.mb_spec.max_sequences_per_mb,
        actor.ppo_n_minibatches,
        actor.mb_spec.granularity,
    )


def _entries(losses: list[Loss]) -> list[Entry]:
    return [Entry(loss.group, loss.try_number, reason=loss.reason) for loss in losses]


def _quarantine(store: Store, shard: str, reason: str) -> None:
    logger.error("shard %s is set aside: %s", shard, reason)
    store.quarantine(shard, reason)
