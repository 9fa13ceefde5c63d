"""A trainer rank of a supervised run: builds its models and rows among its peers, and runs the learner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from pekoe.pipeline.algorithm.supervised.dpo import DpoLoss
from pekoe.pipeline.algorithm.supervised.reward_model import RewardModelLoss
from pekoe.pipeline.algorithm.supervised.sft import SftLoss
from pekoe.pipeline.config.tasks import sides
from pekoe.pipeline.messages import Hello
from pekoe.pipeline.runs.companion_setup import build_frozen
from pekoe.pipeline.runs.context import HEAD, RunContext
from pekoe.pipeline.runs.supervised_data import row_source
from pekoe.pipeline.runs.supervised_rows import EpochOrder, RowPlanner
from pekoe.pipeline.runs.trainer_setup import (
    TrainerRank,
    build_engine,
    form_trainer_group,
    head_orders,
    load_checkpoint,
)
from pekoe.pipeline.train.checkpoint import ENGINE, Checkpoints
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.supervised_learner import (
    INBOX_KINDS,
    RankRows,
    SupervisedLearner,
    SupervisedParts,
    SupervisedTask,
)
from pekoe.pipeline.train.supervised_tasks import LogprobTask, ScoreTask
from pekoe.pipeline.train.trainer_group import TrainerGroup

if TYPE_CHECKING:
    from pekoe.pipeline.runs.rl import Crew

logger = logging.getLogger(__name__)


def train(context: RunContext, crew: Crew, lead: Callable[..., None]) -> str:
    """The learner thread; on the head it starts the controller once the engine stands. Returns how the run ended."""
    config, world = context.config, context.world
    inbox = world.post.inbox(*INBOX_KINDS)
    set_phase = context.phase_of("learner")
    set_phase("forming the trainer group")
    form_trainer_group(context)
    set_phase("loading the model")
    where = TrainerRank.of(context)
    engine = build_engine(config, config.actor, where, head="value" if config.task == "rw" else "lm")
    reference = None
    if config.task == "dpo":
        assert config.ref is not None, "given when a configuration is loaded"
        reference = build_frozen(config, config.ref, "ref", "lm", where)
    checkpoints = Checkpoints(context.run, config.recover.keep, world.attempt)
    if context.start.checkpoint:
        set_phase("loading the checkpoint")
        load_checkpoint(context, {ENGINE: engine})
    set_phase("reading the data")
    group = TrainerGroup(context.torch_device)
    rows_of_step, rows_of_validation = row_functions(context, group)
    orders = head_orders(context, inbox, {ENGINE: engine}, checkpoints)
    parts = SupervisedParts(
        orders=orders,
        task=build_task(context, engine, reference, group),
        rows_of_step=rows_of_step,
        rows_of_validation=rows_of_validation,
        set_version=world.set_version,
    )
    learner = SupervisedLearner(parts, context.num_steps, context.start.version)
    context.watch("learner", orders.progress)
    if context.is_head:
        crew.start("controller", lambda: lead(context, checkpoints))
    world.post.send(HEAD, Hello("trainer", context.start.version))
    outcome = learner.run()
    engine.close()
    if reference is not None:
        reference.close()
    dist.destroy_process_group()
    return outcome


def build_task(
    context: RunContext, engine: TrainEngine, reference: TrainEngine | None, group: TrainerGroup
) -> SupervisedTask:
    """The loss of the task, with the denominators of each batch."""
    config = context.config
    if config.task == "sft":
        return LogprobTask(engine, group, lambda rows: SftLoss(rows.num_labels))
    if config.task == "dpo":
        return LogprobTask(engine, group, lambda rows: DpoLoss(config.dpo, rows.num_examples), reference)
    return ScoreTask(engine, group, lambda rows: RewardModelLoss(rows.num_examples))


def row_functions(
    context: RunContext, group: TrainerGroup
) -> tuple[Callable[[int], RankRows], Callable[[int, int], RankRows]]:
    """(rows of a step by its version, rows of validation examples by first and count)."""
    config, data, ranks = context.config, context.data, context.ranks.trainer_ranks
    planner = RowPlanner(group, ranks.index(context.world.rank), len(ranks), sides(config), config.actor.mb_spec)
    section = config.train_dataset
    order = EpochOrder(len(data.training), section.batch_size, config.total_train_epochs, config.seed, section.shuffle)
    training = row_source(config, data.training, section)
    validation = None
    if config.valid_dataset is not None and data.validation is not None:
        validation = row_source(config, data.validation, config.valid_dataset)

    def of_validation(first: int, count: int) -> RankRows:
        assert validation is not None
        return planner.rows(validation, [(example, example) for example in range(first, first + count)])

    return lambda version: planner.rows(training, order.of_step(version)), of_validation
