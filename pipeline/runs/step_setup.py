"""Wires the algorithm into the training step of a trainer rank: advantages, losses, reductions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pekoe.pipeline.algorithm.m2 import add_m2_keep
from pekoe.pipeline.algorithm.objective import PolicyObjective, is_recomputed, needs_prox_forward
from pekoe.pipeline.algorithm.reward_to_advantage import add_advantages
from pekoe.pipeline.algorithm.value_loss import ValueObjective
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.registry import ADVANTAGE_ESTIMATORS, OBJECTIVES, resolve
from pekoe.pipeline.train.companions import Companions
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.trainer_group import TrainerGroup
from pekoe.pipeline.train.training_step import StepParts, TrainingStep


def build_step(
    config: RunConfig, engine: TrainEngine, companions: Companions, num_steps: int, device: torch.device
) -> TrainingStep:
    """The step of a run of `num_steps`; torch's default group, on `device`, must be that of the trainer ranks.

    Raises ValueError where the user's own objective or estimator cannot be imported: before anything is sampled for it.
    """
    actor = config.actor
    resolve(OBJECTIVES, actor.objective, "actor.objective")
    resolve(ADVANTAGE_ESTIMATORS, actor.advantage_estimator, "actor.advantage_estimator")
    over = TrainerGroup(device)
    max_new_tokens = config.gconfig.max_new_tokens

    def advantages(batches: Sequence[PackedBatch], groups: Sequence[int]) -> dict[str, float]:
        return add_advantages(batches, actor, max_new_tokens, over, groups=groups)

    def keep_mask(minibatch: Sequence[PackedBatch]) -> None:
        if actor.m2_threshold is not None:
            add_m2_keep(minibatch, actor.m2_threshold, over, mask_truncated=actor.mask_truncated)

    def policy_loss(num_active: int, num_sequences: int, version: int) -> PolicyObjective:
        return PolicyObjective(
            actor,
            num_active=num_active,
            num_sequences=num_sequences,
            max_new_tokens=max_new_tokens,
            version=version,
            teacher=config.teacher,
        )

    def value_loss(num_active: int) -> ValueObjective:
        assert config.critic is not None
        return ValueObjective(config.critic, num_active, actor.mask_truncated)

    parts = StepParts(
        engine=engine,
        companions=companions,
        add_advantages=advantages,
        add_keep_mask=keep_mask,
        make_loss=policy_loss,
        make_value_loss=value_loss,
        needs_prox_forward=needs_prox_forward(actor),
        gap_is_recomputed=is_recomputed(actor),
        over=over,
    )
    return TrainingStep(config, parts, num_steps)
