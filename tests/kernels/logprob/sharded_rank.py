"""One rank of a gloo world: log-probs of its rows of the vocabulary.

usage: sharded_rank.py STORE RANK BOUNDS OUT     BOUNDS: first row of each rank and the end, with commas
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from pekoe.kernels.logprob.sharded import sharded_logprobs

SHAPE = (41, 24, 517)
"""(K, H, V)"""
TEMPERATURE = 0.7


def case(dtype):
    """(hidden, weight, bias, targets, g, h) of the whole vocabulary."""
    made = torch.Generator().manual_seed(3)
    num_rows, size, num_columns = SHAPE
    hidden, weight, bias = (
        torch.randn(shape, generator=made).to(dtype)
        for shape in ((num_rows, size), (num_columns, size), (num_columns,))
    )
    weights = [torch.randn(num_rows, generator=made) for _ in range(2)]
    return hidden, weight, bias, torch.randint(0, num_columns, (num_rows,), generator=made), *weights


def results(rank, bounds, dtype, with_entropy):
    hidden, weight, bias, targets, g, h = case(dtype)
    mine = slice(bounds[rank], bounds[rank + 1])
    shard = weight[mine].clone().requires_grad_()
    bias_shard = bias[mine].clone().requires_grad_()
    hidden.requires_grad_()
    logprobs, entropy = sharded_logprobs(
        hidden, shard, bounds[rank], targets, TEMPERATURE, bias_shard=bias_shard, with_entropy=with_entropy
    )
    loss = logprobs @ g.to(logprobs) + (entropy @ h.to(entropy) if with_entropy else 0)
    grads = torch.autograd.grad(loss, (hidden, shard, bias_shard))
    return [tensor.detach() for tensor in (logprobs, entropy, *grads)]


def refusal(rank, bounds):
    """What a target says that no rank has."""
    hidden, weight, _, targets, _, _ = case(torch.float32)
    targets[7] = SHAPE[2]
    try:
        sharded_logprobs(hidden, weight[bounds[rank] : bounds[rank + 1]], bounds[rank], targets)
    except ValueError as error:
        return str(error)
    return None


def main(store, rank, bounds, out):
    torch.set_num_threads(1)
    bounds = [int(text) for text in bounds.split(",")]
    dist.init_process_group(
        "gloo", f"file://{store}", timeout=timedelta(seconds=60), rank=rank, world_size=len(bounds) - 1
    )
    found = {
        f"{str(dtype).partition('.')[2]}-{with_entropy}": results(rank, bounds, dtype, with_entropy)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for with_entropy in (True, False)
    }
    torch.save({"found": found, "refusal": refusal(rank, bounds)}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
