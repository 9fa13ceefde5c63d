"""One rank of a gloo world: advantages and M2PO's mask of its share of a step.

usage: gloo_rank.py STORE RANK SIZE OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from simulated_ranks import packed, trajectory

from pekoe.pipeline.algorithm.m2 import add_m2_keep
from pekoe.pipeline.algorithm.reward_to_advantage import add_advantages
from pekoe.pipeline.config.actor import ActorConfig, NormConfig
from pekoe.pipeline.records import group_number
from pekoe.pipeline.train.trainer_group import TrainerGroup

GROUPS = [group_number(2, 5), group_number(1, 1), group_number(2, 4)]
NUM_ROWS = 11


def rows():
    """(group, sequence, its extras), groups uneven and interleaved."""
    rng = np.random.default_rng(0)
    for number in range(NUM_ROWS):
        n = int(rng.integers(3, 9))
        row = trajectory([0, *[1] * (n - 1)], float(rng.normal()), sample=number)
        gap = rng.normal(size=n) * 0.3
        yield GROUPS[number % 3], row, {"prox_logprobs": row.logprobs + gap, "ref_logprobs": row.logprobs - gap}


def batch_of(part):
    extra = {name: np.concatenate([row[2][name] for row in part]) for name in ("prox_logprobs", "ref_logprobs")}
    return packed(*(row[:2] for row in part), **extra)


def compute(mine, over):
    """Of these rows: (advantages, m2_keep) end to end, and the sums."""
    config = ActorConfig(kl_ctl=0.1, adv_norm=NormConfig("batch", "group"))
    batches = [batch_of(mine[:1]), batch_of(mine[1:])] if mine else []
    sums = add_advantages(batches, config, 10, over, groups=GROUPS)
    add_m2_keep(batches, 0.05, over)
    flat = [np.concatenate([np.zeros(0), *(b.extra[name] for b in batches)]) for name in ("advantages", "m2_keep")]
    return flat, sums


def main(store: str, rank: int, size: int, out: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    (advantages, keep), sums = compute(list(rows())[rank::size], TrainerGroup(torch.device("cpu")))
    np.savez(out, advantages=advantages, keep=keep, names=list(sums), sums=list(sums.values()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
