"""From raw rewards to what is normalised and placed: overlong penalty, bias, scaling, clip, in this order.

An outcome reward is one number a sequence and goes through all of it. Turn rewards are steps on the way: they are
scaled and clipped with it, and the bias, the overlong penalty and group normalisation, which speak of whole sequences,
leave them alone.

Legend: M tokens laid end to end, S sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pekoe.pipeline.algorithm.timesteps import timesteps
from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.records import Float64, Int64


def overlong_penalty(num_sampled: Int64, max_new_tokens: int, config: ActorConfig) -> Float64:
    """[S] in [-factor, 0] for numbers of sampled tokens [S]: 0 up to `max_new_tokens - overlong_tokens`, then falling
    linearly to -factor at `max_new_tokens` (DAPO, Yu et al. 2025); all 0 where it is off."""
    if not config.overlong_reward_penalty:
        return np.zeros(len(num_sampled), dtype=np.float64)
    if not 0 < config.overlong_tokens <= max_new_tokens:
        raise ValueError(
            f"actor.overlong_tokens: {config.overlong_tokens} is not allowed with overlong_reward_penalty; "
            f"1 to gconfig.max_new_tokens ({max_new_tokens})"
        )
    over = np.asarray(num_sampled, dtype=np.float64) - (max_new_tokens - config.overlong_tokens)
    factor = config.overlong_penalty_factor
    return np.clip(-over / config.overlong_tokens * factor, -factor, 0.0)


def shape_rewards(rewards: Float64, bias: float = 0.0, scaling: float = 1.0, clip: float = 20.0) -> Float64:
    """`clip((r + bias) * scaling, -clip, clip)` [S] in float64."""
    if not clip > 0:
        raise ValueError(f"reward_clip: {clip} is not allowed; must be > 0")
    return np.clip((np.asarray(rewards, dtype=np.float64) + bias) * scaling, -clip, clip)


def place_outcomes(outcomes: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rewards [M] with the outcome of each sequence [S] on its last active token, 0 elsewhere; a sequence without
    active tokens places nothing."""
    steps = timesteps(mask, torch.zeros_like(mask, dtype=torch.int64), cu_seqlens, "turn")
    rewards = torch.zeros(len(mask), dtype=outcomes.dtype, device=mask.device)
    return rewards.index_copy(0, steps.last, outcomes[steps.sequence])


def place_turn_rewards(given: Tensor, mask: Tensor, turns: Tensor, cu_seqlens: Tensor, config: ActorConfig) -> Tensor:
    """Rewards [M] with what each turn has earned, `clip(r * scaling, -clip, clip)`, on its last active token.

    `given` [M] holds a turn's reward on any of its tokens (the sum counts).
    """
    steps = timesteps(mask, turns, cu_seqlens, "turn")
    earned = (steps.sum(given) * config.reward_scaling).clamp(-config.reward_clip, config.reward_clip)
    return torch.zeros_like(given).index_copy(0, steps.last, earned)
