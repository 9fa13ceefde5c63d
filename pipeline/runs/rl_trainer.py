"""A trainer rank of an RL run: builds the trainer engine among its peers and runs the learner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pekoe.pipeline.messages import Hello, PublishWeights, TensorSpec
from pekoe.pipeline.records import RowKey, Trajectory
from pekoe.pipeline.registry import WEIGHT_TRANSPORTS, resolve
from pekoe.pipeline.runs.companion_setup import build_companions
from pekoe.pipeline.runs.context import HEAD, RunContext, check_sequences
from pekoe.pipeline.runs.engine_setup import has_teacher_engine
from pekoe.pipeline.runs.step_setup import build_step
from pekoe.pipeline.runs.trainer_setup import (
    TrainerRank,
    build_engine,
    form_trainer_group,
    head_orders,
    load_checkpoint,
)
from pekoe.pipeline.runs.transports import shared_setup, transport_setup
from pekoe.pipeline.train.checkpoint import CRITIC, ENGINE, Checkpoints
from pekoe.pipeline.train.companions import Companions
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.head_orders import HeadOrders
from pekoe.pipeline.train.learner import INBOX_KINDS, BadRowsError, Learner, LearnerParts
from pekoe.pipeline.trajectory.store import BadRows, Store
from pekoe.pipeline.weights.disk import DiskTransport
from pekoe.pipeline.weights.transport import WeightSender
from pekoe.pipeline.weights.transport_setup import TransferError

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
    with context.building:
        where = TrainerRank.of(context)
        engine = build_engine(config, config.actor, where)
        companions = build_companions(config, where)
    transport = resolve(WEIGHT_TRANSPORTS, transport_name(context), "actor.weight_update_mode")
    sender: WeightSender = transport.sender(transport_setup(context, "trainer"))
    shared: WeightSender = DiskTransport.sender(shared_setup(context, "trainer"))
    store = Store(context.run, temperature=config.gconfig.temperature, teacher=has_teacher_engine(config))
    checkpoints = Checkpoints(context.run, config.recover.keep, world.attempt)
    saved = {ENGINE: engine} if companions.critic is None else {ENGINE: engine, CRITIC: companions.critic}
    if context.start.checkpoint:
        set_phase("loading the checkpoint")
        load_checkpoint(context, saved)
    orders = head_orders(context, inbox, saved, checkpoints)
    learner = build_learner(context, orders, engine, companions, sender, shared, store)
    context.watch("learner", orders.progress)
    if context.is_head:
        crew.start("controller", lambda: lead(context, engine, sender, checkpoints, store))
    world.post.send(HEAD, Hello("trainer", context.start.version))
    outcome = learner.run()
    sender.close()
    shared.close()
    companions.close()
    engine.close()
    dist.destroy_process_group()
    return outcome


def build_learner(
    context: RunContext,
    orders: HeadOrders,
    engine: TrainEngine,
    companions: Companions,
    sender: WeightSender,
    shared: WeightSender,
    store: Store,
) -> Learner:
    """The learner with what it needs of the other stages."""
    config = context.config
    token = shared.open_epoch(0, (HEAD,)) if context.is_head else ""

    def read_rows(keys: Sequence[RowKey]) -> list[tuple[int, Trajectory]]:
        try:
            return store.read([(key.shard, key.row) for key in keys])
        except BadRows as error:
            raise BadRowsError(error.rows) from error

    def send_weights(
        message: PublishWeights, specs: Sequence[TensorSpec], weights: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        sender.send(message.version, message.epoch, message.members, specs, weights)

    def share_weights(version: int, specs: Sequence[TensorSpec], weights: Iterator[tuple[str, torch.Tensor]]) -> str:
        shared.send(version, 0, (HEAD,), specs, weights)
        return token

    parts = LearnerParts(
        orders=orders,
        read_rows=read_rows,
        step=build_step(config, engine, companions, context.num_steps, context.torch_device),
        transfer_error=TransferError,
        send_weights=send_weights,
        share_weights=share_weights,
        check_sequences=check_sequences(config),
        set_version=context.world.set_version,
    )
    return Learner(config, parts, context.start.version)


def transport_name(context: RunContext) -> str:
    """Colocated ranks hand weights over locally."""
    return "local" if context.ranks.colocated else context.config.actor.weight_update_mode
