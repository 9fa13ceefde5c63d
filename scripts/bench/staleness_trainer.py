"""Training with an exact lag, in one process: the weights of eta versions ago sample, the newest ones are trained.

    step v:  weights of version max(0, v - eta) sample the whole batch ─► rewards ─► the training step of a trainer rank
             (proximal log-probs, companions, advantages, updates) ─► version v + 1

Engine, companions and step are those of a run (`fsdp` on one rank, `build_companions`, `build_step`), by the same
configuration; a buffer of weights stands in place of rollout, so a run with a seed is the same whatever the machine
does. Every token of a step has the same lag, the largest that `max_head_offpolicyness: eta` allows.
"""

from __future__ import annotations

import collections
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from staleness_sampling import Problem, Task, greedy_accuracy, sample_group
from torch import Tensor
from transformers import AutoModelForCausalLM

from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.batch.plan import plan_batch
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.devices.cpu_device import CpuDevice
from pekoe.pipeline.messages import Plan
from pekoe.pipeline.records import Trajectory, pack
from pekoe.pipeline.runs.companion_setup import build_companions
from pekoe.pipeline.runs.step_setup import build_step
from pekoe.pipeline.runs.trainer_setup import TrainerRank
from pekoe.pipeline.train.engines.fsdp_engine import FsdpEngine

RESAMPLED = 8
"""Batches of groups that dynamic sampling drops at most for one step, as in a run."""


@dataclass
class Curve:
    """One run: held-out accuracy by step, and what its steps report."""

    steps: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def area(self) -> float:
        """Mean height of the accuracy curve."""
        return float(np.trapezoid(self.accuracy, self.steps) / (self.steps[-1] - self.steps[0]))

    @property
    def final(self) -> float:
        """Mean of the last three accuracies: one alone swings by a few problems."""
        return float(np.mean(self.accuracy[-3:]))


@contextmanager
def one_rank() -> Iterator[None]:
    """Torch's default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class LaggedRun:
    """The policy on a trainer rank, and the weights of its last eta + 1 versions."""

    def __init__(self, config: RunConfig, eta: float, task: Task, num_steps: int) -> None:
        """`eta` inf: the start policy samples for ever."""
        self.config, self.eta, self.task, self.version = config, eta, task, 0
        self.engine = FsdpEngine(
            config.actor, token_logprobs=token_logprobs, device=CpuDevice(), weight_dtype="float32",
            total_steps=num_steps, seed=config.seed,
        )  # fmt: skip
        self.companions = build_companions(config, TrainerRank("fsdp", CpuDevice(), 0, num_steps))
        self.training = build_step(config, self.engine, self.companions, num_steps, torch.device("cpu"))
        self.sampler: Any = AutoModelForCausalLM.from_pretrained(config.actor.path, dtype=torch.float32).eval()
        kept = 1 if math.isinf(eta) else int(eta) + 1
        self.snapshots: collections.deque[tuple[int, dict[str, Tensor]]] = collections.deque(maxlen=kept)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.random = random.Random(config.seed)
        self.order: list[Problem] = []

    def accuracy(self) -> float:
        self.sampler.load_state_dict(dict(self.engine.weights()), strict=False)
        return greedy_accuracy(self.sampler, self.task, self.config.gconfig.max_new_tokens)

    def step(self) -> dict[str, float]:
        """One batch, one version; the figures of a run's step."""
        groups = self._sample()
        rows = [(number, trajectory) for number, group in enumerate(groups) for trajectory in group]
        lengths = np.array([len(trajectory.tokens) for _, trajectory in rows])
        numbers = np.array([number for number, _ in rows])
        actor = self.config.actor
        (cut,) = plan_batch(lengths, numbers, 1, actor.mb_spec.max_tokens_per_mb, minibatches=actor.ppo_n_minibatches)
        minibatches = [[pack([rows[row] for row in piece]) for piece in minibatch] for minibatch in cut]
        plan = Plan(
            version=self.version, round=0, shards=(), minibatches=(), groups=tuple(range(len(groups))),
            num_active=tuple(sum(int(batch.loss_mask.sum()) for batch in minibatch) for minibatch in minibatches),
            num_sequences=tuple(sum(batch.num_sequences for batch in minibatch) for minibatch in minibatches),
        )  # fmt: skip
        figures = self.training.run(plan, minibatches, lambda phase: None)
        self.version += 1
        return figures

    def _sample(self) -> list[list[Trajectory]]:
        """A batch of groups by the lagging weights; with dynamic sampling those whose rewards differ, within bounds."""
        config = self.config
        if not (math.isinf(self.eta) and self.snapshots):
            self.snapshots.append((self.version, {name: tensor.clone() for name, tensor in self.engine.weights()}))
        version, weights = self.snapshots[0]
        self.sampler.load_state_dict(weights, strict=False)
        wanted = config.train_dataset.batch_size
        kept: list[list[Trajectory]] = []
        dropped: list[list[Trajectory]] = []
        while len(kept) < wanted:
            problems = [self._next_problem() for _ in range(wanted - len(kept))]
            found = sample_group(
                self.sampler, self.task, problems, config.gconfig.n_samples, config.gconfig.max_new_tokens, version,
                self.generator,
            )  # fmt: skip
            if not config.rollout.dynamic_sampling or len(dropped) >= RESAMPLED * wanted:
                return kept + found
            for group in found:
                (kept if len({trajectory.reward for trajectory in group}) > 1 else dropped).append(group)
        return kept

    def _next_problem(self) -> Problem:
        if not self.order:
            self.order = self.random.sample(self.task.train, len(self.task.train))
        return self.order.pop()

    def close(self) -> None:
        self.companions.close()
        self.engine.close()


def train(config: RunConfig, eta: float, num_steps: int, task: Task, eval_every: int) -> Curve:
    """One run, in a process group of one rank (`one_rank`)."""
    began = time.monotonic()
    run = LaggedRun(config, eta, task, num_steps)
    curve = Curve(steps=[0], accuracy=[run.accuracy()])
    for step in range(1, num_steps + 1):
        figures = run.step()
        curve.clipped.append(figures["train/clipped_lower"] + figures["train/clipped_higher"])
        if step % eval_every == 0 or step == num_steps:
            curve.steps.append(step)
            curve.accuracy.append(run.accuracy())
    run.close()
    curve.seconds = time.monotonic() - began
    return curve
