"""A trainer rank of an RL run: builds the trainer engine among its peers and runs the learner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pekoe.pipeline import complete_folder, files
from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.messages import Hello, Inbox, PublishWeights, TensorSpec
from pekoe.pipeline.records import RowKey, Trajectory
from pekoe.pipeline.registry import TRAIN_ENGINES, WEIGHT_TRANSPORTS, resolve
from pekoe.pipeline.runs.companion_setup import TrainerRank, build_companions
from pekoe.pipeline.runs.context import HEAD, RunContext, check_sequences
from pekoe.pipeline.runs.engine_setup import has_teacher_engine
from pekoe.pipeline.runs.rank_store import meet
from pekoe.pipeline.runs.step_setup import build_step
from pekoe.pipeline.runs.transports import shared_setup, transport_setup
from pekoe.pipeline.train.checkpoint import CRITIC, ENGINE, LATE_SECONDS, Checkpoints
from pekoe.pipeline.train.companions import Companions
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.learner import INBOX_KINDS, BadRowsError, Learner, LearnerParts
from pekoe.pipeline.train.rng_state import capture_rng_state, restore_rng_state, seed_generators
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
        engine = build_engine(context)
        companions = build_companions(
            config,
            TrainerRank(context.ranks.actor.engine, context.device, context.device_index, context.num_steps),
        )
    transport = resolve(WEIGHT_TRANSPORTS, transport_name(context), "actor.weight_update_mode")
    sender: WeightSender = transport.sender(transport_setup(context, "trainer"))
    shared: WeightSender = DiskTransport.sender(shared_setup(context, "trainer"))
    store = Store(context.run, temperature=config.gconfig.temperature, teacher=has_teacher_engine(config))
    checkpoints = Checkpoints(context.run, config.recover.keep, world.attempt)
    if context.start.checkpoint:
        set_phase("loading the checkpoint")
        load_checkpoint(context, saved_engines(engine, companions))
    learner = build_learner(context, inbox, engine, companions, sender, shared, store, checkpoints)
    context.watch("learner", learner.progress)
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
    inbox: Inbox,
    engine: TrainEngine,
    companions: Companions,
    sender: WeightSender,
    shared: WeightSender,
    store: Store,
    checkpoints: Checkpoints,
) -> Learner:
    """The learner with what it needs of the other stages."""
    config, world = context.config, context.world
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
        post=world.post,
        inbox=inbox,
        head=HEAD,
        engine=engine,
        saved=saved_engines(engine, companions),
        read_rows=read_rows,
        step=build_step(config, engine, companions, context.num_steps, context.torch_device),
        transfer_error=TransferError,
        send_weights=send_weights,
        share_weights=share_weights,
        check_sequences=check_sequences(config),
        checkpoint_folder=checkpoints.part,
        other_files=lambda: {rng_file(world.rank): capture_rng_state(context.device)},
        start_thread=world.start,
        export_folder=lambda path: context.run.path / path,
        set_phase=context.phase_of("learner"),
        set_version=world.set_version,
    )
    return Learner(config, parts, context.start.version)


def form_trainer_group(context: RunContext) -> None:
    """Trainer ranks alone form torch's default group."""
    world, ranks = context.world, context.ranks.trainer_ranks
    store = meet(context, ranks, "trainers")
    dist.init_process_group(
        context.device.process_group_backend,
        store=PrefixStore(f"{context.run.path}/{world.attempt}", store),
        rank=ranks.index(world.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=context.config.cluster.setup_seconds),
    )


def build_engine(context: RunContext) -> TrainEngine:
    """The configured trainer engine over the trainer ranks."""
    name = context.ranks.actor.engine
    engine: TrainEngine = resolve(TRAIN_ENGINES, name, "allocation")(
        context.config.actor,
        token_logprobs=token_logprobs,
        device=context.device,
        device_index=context.device_index,
        weight_dtype=context.config.rollout.dtype,
        total_steps=context.num_steps,
        seed=context.config.seed,
    )
    return engine


def saved_engines(engine: TrainEngine, companions: Companions) -> dict[str, TrainEngine]:
    """What a checkpoint holds, by its folder in it."""
    return {ENGINE: engine} if companions.critic is None else {ENGINE: engine, CRITIC: companions.critic}


def transport_name(context: RunContext) -> str:
    """Colocated ranks hand weights over locally."""
    return "local" if context.ranks.colocated else context.config.actor.weight_update_mode


def load_checkpoint(context: RunContext, saved: Mapping[str, TrainEngine]) -> None:
    """Fills the engines, and this rank's random generators; a rank that the saved run did not have (another number of
    trainer ranks) gets fresh ones, by its number and the version. The marker says which it is, not a look at the
    disk."""
    folder = Path(context.start.checkpoint)
    marker = complete_folder.read_marker(folder, retry_seconds=LATE_SECONDS)
    names = {file.name for file in complete_folder.listed_files(marker)}
    for part, engine in saved.items():
        if not any(name.startswith(f"{part}/") for name in names):
            raise ValueError(f"{part}: {folder} has none; a run goes on with the models that it began with")
        engine.load(folder / part)
    name = rng_file(context.world.rank)
    if name in names:
        restore_rng_state(files.read_bytes(folder / name, LATE_SECONDS), context.device)
        return
    logger.info("random generators start anew: the checkpoint has none for rank %d", context.world.rank)
    seed_generators(context.config.seed, context.start.version, context.world.rank)


def rng_file(rank: int) -> str:
    """Random states of a trainer rank, in a checkpoint."""
    return f"rng-{rank}.msgpack"
