"""The head of a supervised run: wires the controller to checkpoints, metrics and the progress display."""

from __future__ import annotations

import logging
import time

from pekoe.pipeline.control.stop_watch import StopWatch
from pekoe.pipeline.control.supervised_controller import INBOX_KINDS, ControlParts, SupervisedController
from pekoe.pipeline.control.supervised_report import SupervisedReport
from pekoe.pipeline.observe.metrics import MetricsWriter
from pekoe.pipeline.observe.progress import Progress
from pekoe.pipeline.observe.report import report
from pekoe.pipeline.runs.bookkeeping import Bookkeeping
from pekoe.pipeline.runs.context import HEAD, RunContext
from pekoe.pipeline.runs.disk_estimate import log_estimate
from pekoe.pipeline.runs.spent_shards import Kept
from pekoe.pipeline.runs.supervised_resume import SupervisedPast
from pekoe.pipeline.train.checkpoint import Checkpoints
from pekoe.pipeline.trajectory.ledger import Ledger

logger = logging.getLogger(__name__)

TIDY_SECONDS = 60.0
"""At the end, for removing what the last checkpoint covers."""


def lead(context: RunContext, checkpoints: Checkpoints, *, past: SupervisedPast) -> None:
    """The controller thread, until everybody was told to stop; `past` is what earlier attempts left for it."""
    config, world, run = context.config, context.world, context.run
    inbox = world.post.inbox(*INBOX_KINDS)
    num_trainers = len(context.ranks.trainer_ranks)
    books = Bookkeeping(
        Ledger(run),
        checkpoints,
        Kept(),
        set,
        lambda message: inbox.put((HEAD, message)),
        num_trainers,
        may_write=world.check_newest,
    )
    world.start("bookkeeping", books.run)
    log_estimate(run, config, num_trainers=num_trainers, num_rollouts=0, num_steps=context.num_steps)
    metrics = MetricsWriter(run, world.attempt, tensorboard=config.stats_logger.tensorboard)
    progress = Progress(config.stats_logger.progress)
    figures = SupervisedReport(metrics.write, progress.update, dropped=dict(past.state.get("dropped", {})))
    stop = StopWatch(
        world.stop_requested.is_set,
        lambda: None if world.ends_at is None else world.ends_at - time.time(),
        config.cluster.grace_seconds,
        past.state.get("save_seconds"),
    )
    validation = context.data.validation
    parts = ControlParts(
        post=world.post,
        inbox=inbox,
        trainer_ranks=context.ranks.trainer_ranks,
        num_validation=0 if validation is None else len(validation),
        done_before=past.done,
        checkpoints=books,
        report=figures,
        stop=stop,
        peer_failed=world.peer_failed,
        stacks_of=world.stacks_of,
        set_phase=context.phase_of("controller"),
    )
    try:
        SupervisedController(config, parts, context.num_steps, context.start.version).run()
        books.close(stop.spare(TIDY_SECONDS))
    finally:
        progress.close()
        metrics.close()
    _tell_the_end(context, figures)


def _tell_the_end(context: RunContext, figures: SupervisedReport) -> None:
    try:
        print(report(context.run), flush=True)
    except Exception:
        logger.exception(
            "the report could not be made; the run itself has ended well (pekoe report %s)", context.run.path
        )
    if summary := figures.summary():
        logger.warning(summary)
        print(summary, flush=True)
