"""The learning-rate schedule as a pure function of the step: nothing to save, nothing to lose on resume."""

from __future__ import annotations

import math

from pekoe.pipeline.config.optimizer import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rate of step `step` (from 0) of `total_steps`.

    Linear warm-up over the first `warmup_steps_proportion` of all steps (reaching the peak at its last one), then
    constant, linear or cosine down to `min_lr_ratio` of the peak just after the last step.
    """
    warmup = math.ceil(config.warmup_steps_proportion * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type == "constant":
        return config.lr
    if config.lr_scheduler_type == "linear":
        share = 1 - done
    elif config.lr_scheduler_type == "cosine":
        share = (1 + math.cos(math.pi * done)) / 2
    else:
        allowed = "constant, linear, cosine"
        raise ValueError(f"actor.optimizer.lr_scheduler_type: {config.lr_scheduler_type!r} is not allowed; {allowed}")
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
