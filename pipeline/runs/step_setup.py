"""Wires the algorithm into the training step of a trainer rank: advantages, losses, reductions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pekoe.pipeline.algorithm.advantages import place_outcomes, token_gae
from pekoe.pipeline.algorithm.normalise import normalise_rewards, normalise_tokens
from pekoe.pipeline.algorithm.objective import PolicyObjective, needs_prox_forward
from pekoe.pipeline.algorithm.rewards import shape_rewards
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.trainer_group import TrainerGroup
from pekoe.pipeline.train.training_step import StepCompanions, StepParts, TrainingStep


def build_step(
    config: RunConfig, engine: TrainEngine, companions: StepCompanions | None, num_steps: int, device: torch.device
) -> TrainingStep:
    """The step of a run of `num_steps`; torch's default group, on `device`, must be that of the trainer ranks."""
    over = TrainerGroup(device)

    def make_loss(num_active: int, num_sequences: int, version: int) -> PolicyObjective:
        return PolicyObjective(
            config.actor,
            num_active=num_active,
            num_sequences=num_sequences,
            max_new_tokens=config.gconfig.max_new_tokens,
            version=version,
        )

    parts = StepParts(
        engine=engine,
        companions=companions,
        add_advantages=lambda batches, groups: add_advantages(config, batches, groups, over),
        add_keep_mask=None,
        make_loss=make_loss,
        make_value_loss=lambda num_active: None,
        needs_prox_forward=needs_prox_forward(config.actor),
        over=over,
    )
    return TrainingStep(config, parts, num_steps)


def add_advantages(
    config: RunConfig, batches: Sequence[PackedBatch], groups: Sequence[int], over: TrainerGroup
) -> dict[str, float]:
    """Rewards of the whole step -> outcomes (normalised over true groups), placed on the last active token, spread
    (GAE without a critic), normalised."""
    actor = config.actor
    own = np.concatenate([
        np.stack([batch.rewards, batch.groups.astype(np.float64), batch.samples.astype(np.float64)], axis=1)
        for batch in batches
    ])  # fmt: skip
    everyone = over.gather(np.concatenate([own, np.full((len(own), 1), float(over.rank))], axis=1))
    shaped = shape_rewards(everyone[:, 0], actor.reward_bias, actor.reward_scaling, actor.reward_clip)
    numbers = everyone[:, 1:3].astype(np.int64)
    outcomes = normalise_rewards(shaped, numbers[:, 0], numbers[:, 1], actor.reward_norm)
    mine = np.split(outcomes[everyone[:, 3] == over.rank], np.cumsum([batch.num_sequences for batch in batches])[:-1])
    for batch, part in zip(batches, mine, strict=True):
        mask, cu_seqlens = torch.from_numpy(batch.loss_mask), torch.from_numpy(batch.cu_seqlens)
        placed = place_outcomes(torch.from_numpy(part), mask, cu_seqlens)
        advantages, _ = token_gae(placed, mask, cu_seqlens, actor.discount, actor.gae_lambda)
        batch.extra["advantages"] = advantages.to(torch.float32).numpy()
    figures = {"reward/shaped": float(shaped.mean())}
    if actor.adv_norm is None:
        return figures
    lengths = np.concatenate([batch.lengths for batch in batches])
    of_rows = np.concatenate([batch.groups for batch in batches])
    normalised = normalise_tokens(
        torch.from_numpy(np.concatenate([batch.extra["advantages"] for batch in batches])),
        torch.from_numpy(np.concatenate([batch.loss_mask for batch in batches])),
        torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        torch.from_numpy(np.searchsorted(np.asarray(groups, dtype=np.int64), of_rows)),
        actor.adv_norm,
        reduce_sum=over.sum,
        reduce_max=over.max,
        num_groups=len(groups),
    )
    cut = np.cumsum([batch.num_tokens for batch in batches])[:-1]
    for batch, piece in zip(batches, np.split(normalised.numpy(), cut), strict=True):
        batch.extra["advantages"] = piece
    return figures
