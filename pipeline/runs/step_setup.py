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


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERTS_A_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k", "moe_k")
"""What models' configurations call them."""


def token_work(config: RunConfig, engine: TrainEngine) -> TokenWork:
    """Of the policy, by its configuration and its matrices; of experts those that a token goes to. Of what the
    configuration does not say nothing is counted, and all experts where it does not say how many a token goes to."""
    from transformers import AutoConfig

    facts: Any = AutoConfig.from_pretrained(config.actor.path).get_text_config()
    facts.allow_global_per_layer_attribute_access = True  # where layers differ, what is said of all will do
    experts, chosen = _number(facts, *EXPERTS), _number(facts, *EXPERTS_A_TOKEN)
    share = min(1.0, chosen / experts) if experts and chosen else 1.0
    weights = 0.0
    for spec in engine.weight_specs():
        if len(spec.shape) > 1 and not any(part in spec.name for part in ("embed", "lm_head")):
            weights += math.prod(spec.shape) * (share if ".experts." in spec.name else 1.0)
    width, heads = _number(facts, "hidden_size"), _number(facts, "num_attention_heads")
    plain = _number(facts, "head_dim") or (width / heads if heads else 0.0)
    parted = _number(facts, "qk_nope_head_dim") + _number(facts, "qk_rope_head_dim")
    keys = parted if _number(facts, "qk_nope_head_dim") else plain
    values = _number(facts, "v_head_dim") or plain
    return TokenWork(
        per_token=2 * weights or 1.0,
        per_pair=2 * _number(facts, "num_hidden_layers") * heads * (keys + values),
        per_active=2 * width * _number(facts, "vocab_size"),
    )


def _number(facts: Any, *names: str) -> float:
    """What the first of these names says that says a number above 0, the mean of a list of layers; 0 where none
    does."""
    for name in names:
        said = getattr(facts, name, None)
        numbers = [one for one in (said if isinstance(said, list | tuple) else [said]) if isinstance(one, int | float)]
        if sum(numbers) > 0:
            return sum(numbers) / len(numbers)
    return 0.0
