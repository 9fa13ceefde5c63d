"""`critic`, `ref`, `teacher`, `reward_model`: models beside the policy on trainer ranks; an absent one is off."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.pipeline.config.actor import ModelConfig
from pekoe.pipeline.config.fields import setting


@dataclass
class CriticConfig(ModelConfig):
    """The value model of PPO: own weights, optimiser and schedule."""

    path: str = setting("", "folder of a causal model or of one with a value head; empty = actor.path")
    eps_clip: float | None = setting(0.5, "clip of value updates; null = none", above=0)
    warmup_steps: int = setting(0, "first steps in which only the critic is updated", minimum=0)
    ppo_epochs: int = setting(1, "passes of a step over its minibatches", minimum=1)


@dataclass
class FrozenModelConfig:
    """A model that is only asked."""

    path: str = setting("", "model folder; empty = actor.path")
    dtype: str = setting(
        "bfloat16", "compute dtype; left out = actor.dtype", choices=("float32", "float64", "bfloat16")
    )
    offload_params: bool = setting(False, "keep the weights in host memory between uses")


@dataclass
class RefConfig(FrozenModelConfig):
    """The reference policy of KL terms and of DPO."""


@dataclass
class TeacherConfig(FrozenModelConfig):
    """The teacher of on-policy distillation."""

    place: str = setting(
        "trainer",
        "who asks it: trainer = the trainer ranks, engine = an engine on each rollout rank, when a group is done",
        choices=("trainer", "engine"),
    )
    rl_loss_weight: float = setting(0.0, "weight of the policy objective; 0 = distillation alone", minimum=0)
    distill_loss_weight: float = setting(1.0, "weight of the reverse KL to the teacher", above=0)


@dataclass
class RewardModelConfig(FrozenModelConfig):
    """A model that judges trajectories on the trainer ranks; its score is added to the reward function's."""

    kind: str = setting(
        "scalar",
        "scalar = head at the last token (task rw trains one); generative = probability of an answer after a question",
        choices=("scalar", "generative"),
    )
    unit: str = setting(
        "outcome", "what gets a score: outcome = the sequence, turn = each sampled turn (process rewards)",
        choices=("outcome", "turn"),
    )  # fmt: skip
    weight: float = setting(1.0, "factor on the score")
    question: str = setting("\n\nIs this answer correct?", "generative: text put after the trajectory")
    answer: str = setting(" Yes", "generative: text whose probability is the score")


@dataclass
class DpoConfig:
    """Direct preference optimisation (task dpo)."""

    beta: float = setting(0.1, "strength of the pull to the reference", above=0)
    loss_type: str = setting("sigmoid", "form of the loss", choices=("sigmoid", "ipo"))
