"""`actor.optimizer`: AdamW and its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.pipeline.config.fields import setting


@dataclass
class OptimizerConfig:
    """AReaL's names."""

    type: str = setting("adamw", "optimizer", choices=("adamw",))
    lr: float = setting(1e-6, "peak learning rate", minimum=0)
    weight_decay: float = setting(0.01, "decoupled weight decay (none on norms and biases)", minimum=0)
    beta1: float = setting(0.9, "first-moment decay", minimum=0, maximum=1)
    beta2: float = setting(0.999, "second-moment decay", minimum=0, maximum=1)
    eps: float = setting(1e-8, "denominator floor", above=0)
    lr_scheduler_type: str = setting("constant", "schedule after warm-up", choices=("constant", "linear", "cosine"))
    min_lr_ratio: float = setting(0.0, "final lr / peak lr", minimum=0, maximum=1)
    warmup_steps_proportion: float = setting(0.0, "share of all steps spent in linear warm-up", minimum=0, maximum=1)
    gradient_clipping: float = setting(1.0, "largest global gradient norm", above=0)
