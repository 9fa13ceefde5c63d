"""One rank of a small trainer world with value engines and the models beside a policy.

usage: value_world.py FOLDER RANK SIZE SCENARIO...      as `fsdp_world.py`
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import fsdp_world as world  # noqa: E402
import torch  # noqa: E402

from pekoe.pipeline.algorithm.token_values import token_values  # noqa: E402
from pekoe.pipeline.config.actor import FsdpConfig, ModelConfig  # noqa: E402
from pekoe.pipeline.config.companions import CriticConfig, RefConfig, RewardModelConfig, TeacherConfig  # noqa: E402
from pekoe.pipeline.config.run import RunConfig  # noqa: E402
from pekoe.pipeline.devices.cpu_device import CpuDevice  # noqa: E402
from pekoe.pipeline.runs.companion_setup import build_companions  # noqa: E402
from pekoe.pipeline.runs.trainer_setup import TrainerRank  # noqa: E402

TEMPERATURE = world.TEMPERATURE
WEIGHTS = (0.3, 0.7)
"""Of values and of scores in the loss."""


def model(folder, kind="value-qwen3", dtype="float64", lr=1e-2, **more):
    return ModelConfig(path=str(folder / kind), dtype=dtype, optimizer=world.OptimizerConfig(lr=lr), **more)


def build(config, **more):
    return world.FsdpEngine(
        config,
        head="value",
        token_values=token_values,
        device=CpuDevice(),
        weight_dtype="float64",
        total_steps=10,
        seed=1,
        section="critic",
        **more,
    )


def targets(rows):
    """Of the tokens and of the sequences of these rows, float64."""
    made = [(torch.linspace(-1, row + 1, world.LENGTHS[row], dtype=torch.float64), row - 2.0) for row in rows]
    tokens = torch.cat([torch.zeros(0, dtype=torch.float64), *(tokens for tokens, _ in made)])
    return tokens, torch.tensor([score for _, score in made], dtype=torch.float64)


class SquaredErrors:
    """Of active tokens and of sequences, as a share of the whole batch."""

    def __call__(self, values, scores, batch):
        tokens, finals = targets(batch["groups"].tolist())
        off = ((values - tokens).square() * batch["loss_mask"]).sum()
        share = WEIGHTS[0] * off + WEIGHTS[1] * (scores - finals).square().sum()
        return share, {"loss": share.detach(), "tokens": batch["loss_mask"].sum()}


def train(engine, cut="one"):
    return world.train(engine, cut, SquaredErrors())


def scenario_gradients(folder, rank, size):
    """Of a folder with a head and of one without; lr 0, so that one engine serves all cuts."""
    found = {}
    for kind in ("value-qwen3", "llama"):
        engine = build(model(folder, kind, lr=0.0))
        for cut in world.CUTS:
            found[kind, cut] = train(engine, cut)
        found[kind, "values"] = engine.forward_values([world.make_batch([0, 1, 2]), world.make_batch([])])
    for name, option in {
        "offload": {"fsdp": FsdpConfig(offload_params=True)},
        "checkpointing": {"gradient_checkpointing": True},
    }.items():
        found[name] = train(build(model(folder, lr=0.0, **option)), "uneven")
    return found


def scenario_save(folder, rank, size):
    """From a causal model: two updates, checkpoint, export, a third update."""
    engine = build(model(folder, "qwen3", lr=1e-3))
    for step in range(2):
        engine.set_progress(step / 10)
        train(engine, "uneven")
    engine.stage().write(folder / f"checkpoint-{size}")
    engine.export_hf(folder / f"export-{size}")
    saved = world.weights(engine)
    engine.set_progress(0.2)
    stats, _ = train(engine)
    return {"saved": saved, "stats": stats, "final": world.weights(engine), "specs": engine.weight_specs()}


def scenario_load(folder, rank, size):
    """Continues the checkpoint of the other number of ranks."""
    engine = build(model(folder, "qwen3", lr=1e-3))
    engine.load(folder / f"checkpoint-{3 - size}")
    loaded = world.weights(engine)
    engine.set_progress(0.2)
    stats, _ = train(engine)
    return {"loaded": loaded, "stats": stats, "final": world.weights(engine)}


def scenario_companions(folder, rank, size):
    """All models at once, over rows of which the last rank has few; what rank 0 has of its own rows."""
    config = RunConfig()
    config.actor.path, config.actor.dtype = str(folder / "tiny"), "float64"
    config.actor.mb_spec.max_tokens_per_mb = 16
    config.rollout.dtype = "float32"
    config.ref, config.teacher = RefConfig(dtype="float64"), TeacherConfig(dtype="float64", offload_params=True)
    config.critic = CriticConfig(path=str(folder / "tiny-value"), dtype="float64")
    where = TrainerRank("fsdp", CpuDevice(), 0, 10)
    found = {}
    for kind, unit in (("scalar", "outcome"), ("generative", "outcome"), ("generative", "turn")):
        path = str(folder / ("tiny-value" if kind == "scalar" else "tiny"))
        config.reward_model = RewardModelConfig(
            path=path, dtype="float64", kind=kind, unit=unit, weight=2.0, question="=", answer="42"
        )
        companions = build_companions(config, where)
        batches = [world.pack([(row, world.trajectories(16)[row]) for row in rows]) for rows in share(rank, size)]
        companions.add(batches, TEMPERATURE)
        found[kind, unit] = [{"rows": batch.groups.tolist(), **batch.extra} for batch in batches]
        companions.close()
    return gather(found, size)


def share(rank, size):
    """Rows of each of two micro-batches: the last of two ranks has one row."""
    if size == 1:
        return [[0, 1, 2, 3], [4]]
    return [[[0, 1], [2, 3]], [[], [4]]][rank]


def gather(found, size):
    """Of all ranks, by row: {unit of work: {row: {name: array}}}."""
    told = [None] * size
    torch.distributed.all_gather_object(told, found)
    by_row = {}
    for one in told:
        for key, batches in one.items():
            for batch in batches:
                rows = batch.pop("rows")
                bounds = [0, *torch.tensor([world.LENGTHS[row] for row in rows]).cumsum(0).tolist()] if rows else [0]
                for index, row in enumerate(rows):
                    part = slice(bounds[index], bounds[index + 1])
                    by_row.setdefault(key, {})[row] = {
                        name: array[part] if len(array) == bounds[-1] else array[index] for name, array in batch.items()
                    }
    return by_row


if __name__ == "__main__":
    for name in [name for name in globals() if name.startswith("scenario_")]:
        setattr(world, name, globals()[name])
    world.run_as_program()
