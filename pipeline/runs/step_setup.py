"""Wires the algorithm into the training step of a trainer rank: advantages, losses, reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

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
from pekoe.pipeline.train.sharing_figures import TokenWork, sharing_figures
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
        sharing_figures=partial(sharing_figures, work=token_work(config, engine), over=over)
        if actor.enable_tree_training
        else None,
    )
    return TrainingStep(config, parts, num_steps)


NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""What models' configurations call it."""


def token_work(config: RunConfig, engine: TrainEngine) -> TokenWork:
    """Of the policy, by its configuration and its matrices; of experts those that a token goes to."""
    from transformers import AutoConfig

    facts: Any = AutoConfig.from_pretrained(config.actor.path).get_text_config()
    experts = next((number for name in NUM_EXPERTS if (number := getattr(facts, name, None))), None)
    share = facts.num_experts_per_tok / experts if experts else 1.0
    weights = 0.0
    for spec in engine.weight_specs():
        if len(spec.shape) > 1 and not any(part in spec.name for part in ("embed", "lm_head")):
            weights += math.prod(spec.shape) * (share if ".experts." in spec.name else 1.0)
    head_size = getattr(facts, "head_dim", None) or facts.hidden_size // facts.num_attention_heads
    return TokenWork(
        per_token=2 * weights,
        per_pair=4.0 * facts.num_hidden_layers * facts.num_attention_heads * head_size,
        per_active=2.0 * facts.hidden_size * facts.vocab_size,
    )
