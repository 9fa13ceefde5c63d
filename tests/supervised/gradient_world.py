"""One rank of a small trainer world: losses and gradients of the supervised tasks on real engines in float64.

usage: gradient_world.py FOLDER RANK SIZE      FOLDER holds the models `qwen3` and `scored`; rank 0 writes `found-SIZE`
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "train")]

import fsdp_world as world  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pekoe.pipeline.algorithm.supervised.dpo import DpoLoss  # noqa: E402
from pekoe.pipeline.algorithm.supervised.reward_model import RewardModelLoss  # noqa: E402
from pekoe.pipeline.algorithm.supervised.sft import SftLoss  # noqa: E402
from pekoe.pipeline.algorithm.token_logprobs import token_logprobs  # noqa: E402
from pekoe.pipeline.algorithm.token_values import token_values  # noqa: E402
from pekoe.pipeline.config.actor import ModelConfig  # noqa: E402
from pekoe.pipeline.config.companions import DpoConfig  # noqa: E402
from pekoe.pipeline.devices.cpu_device import CpuDevice  # noqa: E402
from pekoe.pipeline.records import pack  # noqa: E402
from pekoe.pipeline.runs.supervised_rows import as_trajectory  # noqa: E402

LENGTHS = ((3, 7), (3, 4), (1, 2), (1, 3), (5, 12), (5, 6))
"""(prompt tokens, all tokens) of three pairs."""
CUTS = {"one": [[0, 1, 2]], "each": [[2], [0], [1]], "uneven": [[1, 2], [], [0]]}
"""Micro-batches of pairs."""
BETA = 0.4
LOSSES = {
    "sft": lambda: SftLoss(sum(length - prompt for prompt, length in LENGTHS)),
    "dpo": lambda: DpoLoss(DpoConfig(beta=BETA), 3),
    "ipo": lambda: DpoLoss(DpoConfig(beta=BETA, loss_type="ipo"), 3),
    "rw": lambda: RewardModelLoss(3),
}


def sequences():
    """Tokens and labels of each sequence, and log-probs of a reference."""
    rng = np.random.default_rng(0)
    made = []
    for prompt, length in LENGTHS:
        labels = (np.arange(length) >= prompt).astype(np.uint8)
        reference = np.where(labels, -4 + rng.normal(0, 0.3, length), 0)
        made.append((rng.integers(3, 61, length, dtype=np.int32), labels, reference))
    return made


def batch_of(pairs):
    made, rows = sequences(), [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
    batch = pack([(row // 2, as_trajectory(made[row][:2], row % 2)) for row in rows])
    batch.extra["ref_logprobs"] = np.concatenate([np.zeros(0), *(made[row][2] for row in rows)])
    return batch


def build(folder, head):
    config = ModelConfig(path=str(folder / ("scored" if head == "value" else "qwen3")), dtype="float64")
    config.optimizer.lr, config.optimizer.gradient_clipping = 0.0, 1e9
    return world.FsdpEngine(
        config, head=head, token_logprobs=token_logprobs, token_values=token_values, device=CpuDevice(),
        weight_dtype="float64", total_steps=10, seed=1,
    )  # fmt: skip


def gradients(engine, cut, loss):
    """(statistics, full gradients) of one update with learning rate 0."""
    found = {}
    step = engine.optimizer.step

    def spy():
        found.update({name: p.grad.full_tensor() for name, p in engine.model.named_parameters()})
        step()

    engine.optimizer.step = spy
    rank, size = engine.data_parallel_rank, engine.data_parallel_size
    mine = cut[rank::size]
    stats = engine.train_batch([batch_of(pairs) for pairs in mine + [[]] * (-(-len(cut) // size) - len(mine))], loss)
    engine.optimizer.step = step
    return stats, found


def main():
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    world.use_exact_norms()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{size}", rank=rank, world_size=size)
    found = {}
    for head, tasks in (("lm", ("sft", "dpo", "ipo")), ("value", ("rw",))):
        engine = build(folder, head)
        for task in tasks:
            for name, cut in CUTS.items():
                found[task, name] = gradients(engine, cut, LOSSES[task]())
        engine.close()
    if rank == 0:
        torch.save(found, folder / f"found-{size}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
