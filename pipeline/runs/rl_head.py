"""The head of an RL run: wires the controller to data, ledger, shards, checkpoints, weights and metrics."""

from __future__ import annotations

import logging
import time

import numpy as np

from pekoe.pipeline.batch.plan import plan_batch
from pekoe.pipeline.batch.shared_plan import plan_shared
from pekoe.pipeline.control.controller import INBOX_KINDS, Controller
from pekoe.pipeline.control.dispatcher import Dispatcher
from pekoe.pipeline.control.logprob_gap import GapLimit, GapWatch, gap_limit
from pekoe.pipeline.control.parts import ControllerParts
from pekoe.pipeline.control.start_check import StartCheck
from pekoe.pipeline.control.step import Assignment
from pekoe.pipeline.control.step_report import StepReport
from pekoe.pipeline.control.stop_watch import StopWatch
from pekoe.pipeline.control.weight_update import WeightUpdates
from pekoe.pipeline.observe.metrics import MetricsWriter
from pekoe.pipeline.observe.progress import Progress
from pekoe.pipeline.observe.report import report
from pekoe.pipeline.records import Int64, UInt8
from pekoe.pipeline.runs.board_thread import BoardThread, attached_worlds
from pekoe.pipeline.runs.bookkeeping import Bookkeeping
from pekoe.pipeline.runs.context import HEAD, RunContext
from pekoe.pipeline.runs.disk_estimate import log_estimate
from pekoe.pipeline.runs.resume import Past, training_cursor
from pekoe.pipeline.runs.spent_shards import spent_shards
from pekoe.pipeline.train.checkpoint import Checkpoints
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.shared_rows import SHORTEST
from pekoe.pipeline.trajectory.ledger import Ledger
from pekoe.pipeline.trajectory.store import Store
from pekoe.pipeline.weights.transport import WeightSender

logger = logging.getLogger(__name__)

TIDY_SECONDS = 60.0
"""At the end, for removing or archiving what the last checkpoint covers."""


def lead(
    context: RunContext,
    engine: TrainEngine,
    sender: WeightSender,
    checkpoints: Checkpoints,
    store: Store,
    *,
    past: Past,
) -> None:
    """The controller thread, until everybody was told to stop; `past` is what earlier attempts left for it."""
    config, world, run = context.config, context.world, context.run
    inbox = world.post.inbox(*INBOX_KINDS)
    board = BoardThread(context, inbox) if config.rollout_array.enabled else None
    dispatcher = build_dispatcher(context, past, board)
    context.add_gauges("control", dispatcher.gauges)
    books = Bookkeeping(
        Ledger(run),
        checkpoints,
        spent_shards(config.rollout.keep_trajectories, run, store),
        dispatcher.take_idle_shards,
        lambda message: inbox.put((HEAD, message)),
        len(context.ranks.trainer_ranks),
        past.consumed,
        world.check_newest,
    )
    books.spend(past.spent)
    world.start("bookkeeping", books.run)
    log_estimate(
        run,
        config,
        num_trainers=len(context.ranks.trainer_ranks),
        num_rollouts=len(context.ranks.rollout_ranks),
        num_steps=context.num_steps,
    )
    metrics = MetricsWriter(run, world.attempt, tensorboard=config.stats_logger.tensorboard)
    progress = Progress(config.stats_logger.progress)
    validation = context.data.validation
    parts = ControllerParts(
        post=world.post,
        inbox=inbox,
        trainer_ranks=context.ranks.trainer_ranks,
        rollout_ranks=context.ranks.rollout_ranks,
        rollout_leaders=context.ranks.rollout_leaders,
        colocated=context.ranks.colocated,
        dispatcher=dispatcher,
        weights=build_weight_updates(context, engine, sender),
        attached=attached_worlds(context, board) if board else None,
        choose_rows=lambda truncated: rows_that_train(context, truncated),
        plan_rows=lambda lengths, groups, shared: plan_rows(context, lengths, groups, shared),
        num_validation=0 if validation is None else len(validation),
        record_step=books.record_step,
        record_end=books.record_end,
        done_before=past.done,
        quarantine=lambda shard, reason: _quarantine(store, shard, reason),
        checkpoints=books,
        report=StepReport(
            metrics.write,
            progress.update,
            gap_watch=GapWatch(engine_gap_limit(context), stops=config.rollout.stop_at_gap),
        ),
        start_check=build_start_check(context),
        stop=build_stop_watch(context, past),
        peer_failed=world.peer_failed,
        stacks_of=world.stacks_of,
        set_phase=context.phase_of("controller"),
    )
    try:
        if board is not None:
            context.add_gauges("attached", board.gauges)
            world.start("leases", board.run)
        outcome = Controller(config, parts, context.num_steps, context.start.version).run()
        if board is not None:
            board.close(outcome)
        books.close(parts.stop.spare(TIDY_SECONDS))
    finally:
        progress.close()
        metrics.close()
    try:
        print(report(run), flush=True)
    except Exception:
        logger.exception("the report could not be made; the run itself has ended well (pekoe report %s)", run.path)


def build_dispatcher(context: RunContext, past: Past, board: BoardThread | None) -> Dispatcher:
    """At the beginning of the data, or where the checkpoint was, with what earlier attempts left to be adopted."""
    cursor = training_cursor(context.config, context.data)
    made = Dispatcher(
        context.config,
        context.world.post,
        cursor,
        context.ranks.rollout_leaders,
        context.num_steps,
        board.board if board is not None else None,
    )
    if past.state:
        cursor.restore(past.state["cursor"])
        made.restore(past.state, context.start.version)
    if context.world.attempt > 0:
        made.offer(past.notices, context.start.version)
    return made


def build_weight_updates(context: RunContext, engine: TrainEngine, sender: WeightSender) -> WeightUpdates:
    """From the first trainer rank to all engines."""
    return WeightUpdates(
        context.world.post,
        context.config.weights,
        context.ranks.trainer_ranks,
        context.ranks.rollout_ranks,
        sender.open_epoch,
        engine.weight_specs,
        engine_gap_limit(context),
        context.ranks.rollout.instances if context.ranks.rollout else (),
    )


def engine_gap_limit(context: RunContext) -> GapLimit:
    """How far the engines of this run and its trainer may lie apart."""
    rollout = context.ranks.rollout
    engine = "attached" if rollout is None else rollout.engine
    return gap_limit(context.config, context.device, engine, context.ranks.actor.engine)


def build_start_check(context: RunContext) -> StartCheck | None:
    """None in a world without engines of its own."""
    ranks = context.ranks
    if not ranks.rollout_leaders:
        return None
    seconds = context.config.cluster.setup_seconds
    return StartCheck(
        context.world.post, ranks.trainer_ranks, ranks.rollout_leaders, engine_gap_limit(context), seconds
    )


def build_stop_watch(context: RunContext, past: Past) -> StopWatch:
    """Hears the signals of all ranks, and knows when the job ends and how long a save took before."""
    world = context.world
    return StopWatch(
        world.stop_requested.is_set,
        lambda: None if world.ends_at is None else world.ends_at - time.time(),
        context.config.cluster.grace_seconds,
        past.state.get("save_seconds"),
    )


def rows_that_train(context: RunContext, truncated: UInt8) -> UInt8:
    """1 for each row of a batch that is trained on."""
    if context.config.actor.mask_truncated:
        return (1 - truncated).astype(np.uint8)
    return np.ones_like(truncated)


def plan_rows(context: RunContext, lengths: Int64, groups: Int64, shared: Int64) -> Assignment:
    """Rows -> trainer ranks, minibatches and micro-batches under the token budget. With prefix sharing rows of a group
    stay together, and what all of them share counts once."""
    actor = context.config.actor
    limits = (
        len(context.ranks.trainer_ranks),
        actor.mb_spec.max_tokens_per_mb,
        actor.mb_spec.max_sequences_per_mb,
        actor.ppo_n_minibatches,
        actor.mb_spec.granularity,
    )
    if actor.enable_tree_training:
        return plan_shared(lengths, groups, np.where(shared < SHORTEST, 0, shared), *limits)
    return plan_batch(lengths, groups, *limits)


def _quarantine(store: Store, shard: str, reason: str) -> None:
    logger.error("shard %s is set aside: %s", shard, reason)
    store.quarantine(shard, reason)
