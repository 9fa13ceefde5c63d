"""The models beside the policy on the trainer ranks, and what each fills into a step's batches.

    reference        ref_logprobs [M]        log-probs at the sampling temperature, 0 where loss_mask is 0
    teacher          teacher_logprobs [M]    the same
    critic           values [M], bootstrap [S]  value of each token; output at the last one, 0 unless truncated
    reward model     model_scores [S], or turn_rewards [M] at the end of each sampled turn

All of them are sharded over the same ranks as the policy, so each forward is collective: every rank passes the same
number of micro-batches, empty ones among them. Only the critic learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pekoe.pipeline.records import TEACHER_LOGPROBS, PackedBatch
from pekoe.pipeline.train.engine import TrainEngine


class RewardModel(Protocol):
    """Judges trajectories (`reward_models.py`)."""

    def add(self, batches: Sequence[PackedBatch]) -> None:
        """Puts its scores into each batch's extra; collective."""
        ...

    def close(self) -> None: ...


@dataclass
class Companions:
    """Those that a run has."""

    reference: TrainEngine | None = None
    teacher: TrainEngine | None = None
    critic: TrainEngine | None = None
    reward_model: RewardModel | None = None

    def add(self, batches: Sequence[PackedBatch], temperature: float) -> None:
        """Fills each batch's extra; collective, with the same number of batches on all ranks."""
        add_logprobs(self.reference, "ref_logprobs", batches, temperature)
        add_logprobs(self.teacher, TEACHER_LOGPROBS, batches, temperature)
        if self.critic is not None:
            add_values(self.critic, batches)
        if self.reward_model is not None:
            self.reward_model.add(batches)

    def close(self) -> None:
        """Lets go of all models; collective."""
        for engine in (self.reference, self.teacher, self.critic, self.reward_model):
            if engine is not None:
                engine.close()


def add_logprobs(engine: TrainEngine | None, name: str, batches: Sequence[PackedBatch], temperature: float) -> None:
    """Puts a frozen model's log-probs [M] of the active tokens into each batch's extra under `name`; collective."""
    if engine is None:
        return
    for batch, logprobs in zip(batches, engine.forward(batches, temperature), strict=True):
        batch.extra[name] = logprobs.cpu().numpy()


def add_values(critic: TrainEngine, batches: Sequence[PackedBatch]) -> None:
    """Puts `values` [M] and `bootstrap` [S] into each batch's extra; collective."""
    for batch, (values, scores) in zip(batches, critic.forward_values(batches), strict=True):
        batch.extra["values"] = values.cpu().numpy()
        batch.extra["bootstrap"] = scores.cpu().numpy() * batch.truncated
