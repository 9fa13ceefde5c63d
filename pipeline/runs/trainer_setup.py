"""What every trainer rank begins with: its peers, models over them, the checkpoint, and the head's orders."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pekoe.pipeline import complete_folder, files
from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.algorithm.token_values import token_values
from pekoe.pipeline.config.actor import ModelConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.devices.device import Device
from pekoe.pipeline.messages import Inbox
from pekoe.pipeline.registry import TRAIN_ENGINES, resolve
from pekoe.pipeline.runs.context import HEAD, RunContext
from pekoe.pipeline.runs.rank_store import meet
from pekoe.pipeline.train.checkpoint import ENGINE, LATE_SECONDS, Checkpoints
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.head_orders import HeadOrders, OrderParts
from pekoe.pipeline.train.rng_state import capture_rng_state, restore_rng_state, seed_generators

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerRank:
    """Where models are built; torch's default group must be that of the trainer ranks."""

    engine: str
    """Name of the trainer engine in the allocation."""
    device: Device
    device_index: int
    num_steps: int

    @classmethod
    def of(cls, context: RunContext) -> TrainerRank:
        return cls(context.ranks.actor.engine, context.device, context.device_index, context.num_steps)


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


def build_engine(config: RunConfig, model: ModelConfig, where: TrainerRank, **options: Any) -> TrainEngine:
    """The trainer engine of the allocation with a model over the trainer ranks; `options` are the engine's own."""
    engine: TrainEngine = resolve(TRAIN_ENGINES, where.engine, "allocation")(
        model,
        token_logprobs=token_logprobs,
        token_values=token_values,
        share_prefixes=config.actor.enable_tree_training,
        device=where.device,
        device_index=where.device_index,
        weight_dtype=config.rollout.dtype,
        total_steps=where.num_steps,
        seed=config.seed,
        **options,
    )
    return engine


def head_orders(
    context: RunContext, inbox: Inbox, saved: Mapping[str, TrainEngine], checkpoints: Checkpoints
) -> HeadOrders:
    """Takes the head's orders; `saved` are the engines that a checkpoint holds, of which the trained model is
    exported."""
    world = context.world
    return HeadOrders(
        OrderParts(
            post=world.post,
            inbox=inbox,
            head=HEAD,
            engine=saved[ENGINE],
            saved=saved,
            checkpoint_folder=checkpoints.part,
            other_files=lambda: {rng_file(world.rank): capture_rng_state(context.device)},
            start_thread=world.start,
            export_folder=lambda path: context.run.path / path,
            set_phase=context.phase_of("learner"),
            asynchronous=context.config.recover.asynchronous,
        )
    )


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
