"""One rank of a small trainer world that makes whole training steps: the head's planner, real engines, the algorithm.

usage: step_world.py FOLDER RANK SIZE SCENARIO...      as `fsdp_world.py`
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import fsdp_world as world  # noqa: E402

from pekoe.pipeline.batch.plan import plan_batch  # noqa: E402
from pekoe.pipeline.config.actor import NormConfig, RejectionConfig  # noqa: E402
from pekoe.pipeline.config.companions import CriticConfig, RefConfig  # noqa: E402
from pekoe.pipeline.config.optimizer import OptimizerConfig  # noqa: E402
from pekoe.pipeline.config.run import RunConfig  # noqa: E402
from pekoe.pipeline.control.group_table import OutstandingGroup  # noqa: E402
from pekoe.pipeline.control.step import make_plans, rows_of  # noqa: E402
from pekoe.pipeline.devices.cpu_device import CpuDevice  # noqa: E402
from pekoe.pipeline.messages import Row  # noqa: E402
from pekoe.pipeline.records import Finish, Trajectory, pack  # noqa: E402
from pekoe.pipeline.runs.companion_setup import build_companions  # noqa: E402
from pekoe.pipeline.runs.step_setup import build_step  # noqa: E402
from pekoe.pipeline.runs.trainer_setup import TrainerRank  # noqa: E402

VERSION = 4
LENGTHS = {10: (7, 9, 5), 11: (12, 6), 14: (8, 5, 11, 6), 15: (9,), 17: (10, 7)}
"""Groups of uneven sizes: tokens of each row."""


def rows():
    """(group number, trajectory) of the batch: prompts, gaps, mixed versions, a truncated row in most groups."""
    rng = np.random.default_rng(5)
    made = []
    for number, lengths in LENGTHS.items():
        for sample, n in enumerate(lengths):
            mask = np.ones(n, np.uint8)
            mask[: 1 + sample % 3] = 0
            if n > 8:
                mask[5] = 0
            active = mask == 1
            one = Trajectory(
                tokens=rng.integers(0, 61, n, dtype=np.int32), loss_mask=mask,
                logprobs=np.where(active, -4.1 + rng.normal(0, 0.2, n), 0).astype(np.float32),
                versions=np.where(active, rng.integers(1, VERSION + 1, n), -1).astype(np.int32),
                turns=np.where(active, (np.arange(n) > 5).astype(np.int32), -1).astype(np.int32),
                prompt_length=1, reward=float(rng.integers(0, 3)),
                finish=Finish.LENGTH if sample == 1 else Finish.STOP, sample=sample,
            )  # fmt: skip
            one.check()
            made.append((number, one))
    return made


def plans_of(config, made, size, version):
    """As the head makes them."""
    groups = {}
    for number, one in made:
        group = groups.setdefault(number, OutstandingGroup(number, 0, 0, 0, 1, 0.0, shard="rows"))
        active = one.versions[one.loss_mask == 1]
        index = sum(len(found.rows) for found in groups.values())
        group.rows += (
            Row(index, one.sample, len(one.tokens), len(active), one.reward, active.min(), active.max(), one.truncated),
        )
    masks = config.actor.mask_truncated
    batch = rows_of(list(groups.values()), lambda truncated: 1 - truncated if masks else np.ones_like(truncated))
    actor = config.actor
    return make_plans(
        batch,
        lambda lengths, numbers, shared: plan_batch(
            lengths, numbers, size, actor.mb_spec.max_tokens_per_mb, None, actor.ppo_n_minibatches
        ),
        version,
        0,
    )


class StepRank:
    """A trainer rank with its models, made from a configuration."""

    def __init__(self, folder, rank, size, config):
        self.config, self.rank, self.size = config, rank, size
        config.gconfig.temperature, config.gconfig.max_new_tokens = world.TEMPERATURE, 12
        device = CpuDevice()
        self.engine = world.build(config.actor)
        self.companions = build_companions(config, TrainerRank("fsdp", device, 0, 10))
        self.step = build_step(config, self.engine, self.companions, 10, device.torch_device(0))
        self.phases = []

    def run(self, made, version=VERSION):
        """(figures, this rank's batches) of a step."""
        plan = plans_of(self.config, made, self.size, version)[self.rank]
        minibatches = [
            [pack([made[row.row] for row in micro_batch]) for micro_batch in minibatch]
            for minibatch in plan.minibatches
        ]
        figures = self.step.run(plan, minibatches, self.phases.append)
        return figures, [batch for minibatch in minibatches for batch in minibatch]

    def found(self, made, version=VERSION):
        """What a step says and leaves behind, by names that are the same on any number of ranks."""
        figures, batches = self.run(made, version)
        told = [None] * self.size
        dist.all_gather_object(told, (figures, list(map(values_of, batches))))
        values = {key: value for _, parts in told for part in parts for key, value in part.items()}
        on_ranks = [sorted({key[0] for part in parts for key in part}) for _, parts in told]
        models = {"actor": self.engine, "critic": self.companions.critic}
        return {
            "figures": [one for one, _ in told], "values": values, "groups": on_ranks,
            "weights": {
                (name, part): tensor
                for name, engine in models.items() if engine is not None
                for part, tensor in world.weights(engine).items()
            },
        }  # fmt: skip

    def close(self):
        self.companions.close()
        self.engine.close()


def values_of(batch):
    """(group, sample) -> advantages and returns of the row."""
    bounds = batch.cu_seqlens
    return {
        (int(batch.groups[s]), int(batch.samples[s])): {
            name: batch.extra[name][bounds[s] : bounds[s + 1]]
            for name in ("advantages", "returns", "m2_keep")
            if name in batch.extra
        }
        for s in range(batch.num_sequences)
    }


def base(folder, **more):
    config = RunConfig()
    config.actor = world.actor(folder, **more)
    config.actor.mb_spec.max_tokens_per_mb = 24
    config.rollout.dtype = "float64"
    return config


def grpo(folder):
    """Two passes over two minibatches, truncated rows masked, advantages normalised over groups of tokens."""
    return base(
        folder, ppo_n_minibatches=2, ppo_epochs=2, mask_truncated=True, adv_norm=NormConfig("group", "batch"),
        loss_aggregation="sequence_mean", overlong_reward_penalty=True, overlong_tokens=6, reward_bias=-0.5,
    )  # fmt: skip


def m2po(folder):
    """Proximal log-probs are computed, but ratios are not taken against them."""
    return base(
        folder, ppo_n_minibatches=2, m2_threshold=0.04, eps_clip=None, reward_norm=NormConfig("batch", None),
        prox_logp_method="loglinear",
    )  # fmt: skip


def ppo(folder):
    """A critic with epochs of its own, a reference in the reward, turns as timesteps."""
    config = base(
        folder, ppo_n_minibatches=2, reward_norm=None, adv_norm=NormConfig("batch", "batch"), gae_unit="turn",
        gae_lambda=0.9, kl_ctl=0.05, rejection_sampling=RejectionConfig(upper=1.2),
    )  # fmt: skip
    config.critic = CriticConfig(
        dtype="float64", ppo_epochs=3, warmup_steps=VERSION, optimizer=OptimizerConfig(lr=5e-3)
    )
    config.ref = RefConfig(path=str(folder / "qwen2"), dtype="float64")
    return config


def scenario_steps(folder, rank, size):
    """Two steps of each algorithm; PPO also one in which the critic warms up."""
    found = {}
    for make in (grpo, m2po, ppo):
        made = StepRank(folder, rank, size, make(folder))
        before = world.weights(made.engine)
        versions = (VERSION - 1, VERSION, VERSION + 1) if make is ppo else (VERSION, VERSION + 1)
        for version in versions:
            found[make.__name__, version] = made.found(rows(), version)
            if version < VERSION:
                after = world.weights(made.engine)
                found["kept"] = all(torch.equal(after[name], before[name]) for name in before)
        made.close()
    return found


def scenario_nothing(folder, rank, size):
    """Steps in which no row trains: an empty batch, and one whose rows are all masked."""
    config = ppo(folder)
    config.actor.mask_truncated = True
    made = StepRank(folder, rank, size, config)
    before = world.weights(made.engine), world.weights(made.companions.critic)
    cut = [(number, one) for number, one in rows() if one.truncated]
    found = [made.found([], VERSION)["figures"], made.found(cut, VERSION)["figures"]]
    after = world.weights(made.engine), world.weights(made.companions.critic)
    same = all(torch.equal(a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a)
    return {"figures": found, "same": same, "next": made.found(rows(), VERSION)}


def scenario_save(folder, rank, size):
    """One step, staged, written; the next step of the same engines, and of others that load it."""
    made = StepRank(folder, rank, size, ppo(folder))
    made.run(rows(), VERSION)
    engines = {"engine": made.engine, "critic": made.companions.critic}
    for name, engine in engines.items():
        engine.stage().write(folder / f"step-{size}" / name)
    return made.found(rows(), VERSION + 1)


def scenario_load(folder, rank, size):
    """The next step by what a world of another size has saved."""
    other = StepRank(folder, rank, size, ppo(folder))
    engines = {"engine": other.engine, "critic": other.companions.critic}
    for name, engine in engines.items():
        engine.load(folder / "step-2" / name)
    return other.found(rows(), VERSION + 1)


if __name__ == "__main__":
    world.__dict__.update({name: value for name, value in globals().items() if name.startswith("scenario_")})
    world.run_as_program()
