"""One training step on one trainer rank, after the head's commit: the same calls on all ranks, in the same order.

    proximal log-probs        a forward pass of the actor, where the objective needs one
    companions                reference, teacher, critic and reward model fill what they know of the rows
    advantages                one pure function over the rank's rows, with reductions over the trainer ranks
    actor                     ppo_epochs x minibatches, an update each; nothing while the critic warms up
    critic                    its own epochs over the same minibatches

A step without rows (all of them masked or filtered) updates nothing; it counts as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.messages import Plan
from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.companions import Companions
from pekoe.pipeline.train.engine import LossFunction, TrainEngine, ValueLossFunction
from pekoe.pipeline.train.step_statistics import Over, UpdateSums, reward_figures, staleness_shares

Minibatches = Sequence[Sequence[PackedBatch]]
"""[minibatch][micro-batch]"""


@dataclass
class StepParts:
    """What a step is made of; `runs/step_setup.py` passes it in."""

    engine: TrainEngine
    companions: Companions
    add_advantages: Callable[[list[PackedBatch], Sequence[int]], dict[str, float]]
    """Puts `advantages` and `returns` [M] into each batch's extra, from its rewards and what the companions filled; all
    groups of the step come with it. Gives sums over the trainer ranks (`reward_figures`). Collective."""
    add_keep_mask: Callable[[Sequence[PackedBatch]], None]
    """Chooses the tokens of one minibatch that train, over all ranks, where the objective wants that; collective."""
    make_loss: Callable[[int, int, int], LossFunction]
    """(active tokens, sequences of the global minibatch, version) -> its loss."""
    make_value_loss: Callable[[int], ValueLossFunction]
    """(active tokens of the global minibatch) -> the critic's loss."""
    needs_prox_forward: bool
    gap_is_recomputed: bool
    """The gap of trainer and engine in an update's statistics is of the step's version in every minibatch, not only in
    the first one."""
    over: Over
    sharing_figures: Callable[[Sequence[PackedBatch]], dict[str, float]] | None = None
    """What prefix sharing saves of these micro-batches, over all ranks; collective. None: it is off."""


class TrainingStep:
    """Belongs to the learner; keeps nothing from one step to the next."""

    def __init__(self, config: RunConfig, parts: StepParts, num_steps: int) -> None:
        self.config, self.parts, self.num_steps = config, parts, num_steps

    def run(self, plan: Plan, minibatches: Minibatches, set_phase: Callable[[str], None]) -> dict[str, float]:
        """Trains on the rows of `plan`, read and packed; gives the metrics of the step, equal on all ranks."""
        warms_up = self._warms_up(plan.version)
        actor, critic = UpdateSums(), UpdateSums()
        figures: dict[str, float] = {}
        if plan.groups:
            figures = self._prepare(plan, minibatches, set_phase, warms_up)
            if not warms_up:
                set_phase("training")
                self._train_actor(plan, minibatches, actor)
            if self.parts.companions.critic is not None:
                set_phase("training the critic")
                self._train_critic(self.parts.companions.critic, plan, minibatches, critic)
        figures |= actor.means("train", self.config.actor.ppo_epochs) | actor.engine_gap()
        if self.config.critic is not None:
            figures |= critic.means("critic", self.config.critic.ppo_epochs)
        return figures

    def _warms_up(self, version: int) -> bool:
        """Whether the critic alone is updated in the step at `version`."""
        critic = self.config.critic
        return critic is not None and version < critic.warmup_steps

    def _prepare(
        self, plan: Plan, minibatches: Minibatches, set_phase: Callable[[str], None], warms_up: bool
    ) -> dict[str, float]:
        """Everything that the updates read, by the weights at the start of the step."""
        parts, temperature = self.parts, self.config.gconfig.temperature
        batches = [batch for minibatch in minibatches for batch in minibatch]
        # In warm-up the ratio is not taken; a KL reward is of the proximal policy, then as ever.
        if parts.needs_prox_forward and not (warms_up and self.config.actor.kl_ctl == 0):
            set_phase("proximal log-probs")
            found = parts.engine.forward(batches, temperature)
            for batch, logprobs in zip(batches, found, strict=True):
                batch.extra["prox_logprobs"] = logprobs.cpu().numpy()
        set_phase("asking the models beside the actor")
        parts.companions.add(batches, temperature)
        set_phase("advantages")
        figures = reward_figures(parts.add_advantages(batches, plan.groups))
        for minibatch in () if warms_up else minibatches:
            parts.add_keep_mask(minibatch)
        if parts.sharing_figures is not None:
            figures |= parts.sharing_figures(batches)
        return figures | staleness_shares(batches, plan.version, parts.over)

    def _train_actor(self, plan: Plan, minibatches: Minibatches, sums: UpdateSums) -> None:
        engine = self.parts.engine
        engine.set_progress(plan.version / max(self.num_steps, 1))
        for epoch in range(self.config.actor.ppo_epochs):
            for index, batches in enumerate(minibatches):
                loss = self.parts.make_loss(plan.num_active[index], plan.num_sequences[index], plan.version)
                stats = engine.train_batch(batches, loss, self.config.gconfig.temperature)
                sums.add(stats, is_fresh=epoch == 0 and (index == 0 or self.parts.gap_is_recomputed))

    def _train_critic(self, engine: TrainEngine, plan: Plan, minibatches: Minibatches, sums: UpdateSums) -> None:
        config = self.config.critic
        assert config is not None
        engine.set_progress(plan.version / max(self.num_steps, 1))
        for _ in range(config.ppo_epochs):
            for index, batches in enumerate(minibatches):
                loss = self.parts.make_value_loss(plan.num_active[index])
                sums.add(engine.train_batch(batches, loss))
