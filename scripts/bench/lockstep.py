"""What the ranks of one engine pay for staying in step: one turn of their line against a plain broadcast of 8 bytes.

    python scripts/bench/lockstep.py [--quick] [--ranks N]

Every turn carries the commands of a step in which sequences enter and leave (encoded and decoded each time), and the
digest of the sampled tokens, which is compared. The baseline is a bare gloo broadcast by the same processes, in turns
with it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import time
from datetime import timedelta
from statistics import median
from typing import Any

from bench_result import report

ROUNDS = 7
TARGET = 4.0
SLOTS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 9))
    arguments = parser.parse_args()
    turns = 300 if arguments.quick else 2000
    owner = socket.create_server(("127.0.0.1", 0))
    port = owner.getsockname()[1]
    owner.close()
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=play, args=(rank, arguments.ranks, port, turns), daemon=True)
        for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    return 0 if all(process.exitcode == 0 for process in processes) else 1


def play(rank: int, size: int, port: int, turns: int) -> None:
    """One rank; the leader measures and reports."""
    import torch
    from torch._C._distributed_c10d import TCPStore

    from pekoe.pipeline.rollout.engine import Instance
    from pekoe.pipeline.rollout.engines.vllm.lockstep import Lockstep

    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    line = Lockstep(Instance(size, rank, store), print)
    sampled = [(number, 7 * number, -1.5) for number in range(SLOTS)]
    whole, plain = [], []
    for _ in range(ROUNDS):
        whole.append(seconds_per_turn(lambda: turn(line, sampled), turns))
        small = torch.zeros(8, dtype=torch.uint8)
        plain.append(seconds_per_turn(lambda small=small: line._broadcast(small), turns))
    line.close()
    if rank == 0:
        figures = {
            "ranks": size,
            "turn_microseconds": round(median(whole) * 1e6, 1),
            "broadcast_microseconds": round(median(plain) * 1e6, 1),
            "turn_over_broadcast": round(median(a / b for a, b in zip(whole, plain, strict=True)), 2),
        }
        met = report("lockstep", figures, {"turn_over_broadcast": (f"<= {TARGET}", lambda ratio: ratio <= TARGET)})
        sys.exit(0 if met else 1)


def turn(line: Any, sampled: list[tuple[int, int, float]]) -> None:
    """A step in which four sequences end and four begin."""
    from pekoe.pipeline.rollout.engine import GenerationRequest
    from pekoe.pipeline.rollout.engines.vllm.commands import Add, Remove, Turn
    from pekoe.pipeline.rollout.engines.vllm.turn_codec import decode_turn, encode_turn

    if line.leads:
        adds = [Add(n, GenerationRequest(tuple(range(64)), seed=n), (1,), 32) for n in range(4)]
        line.share(encode_turn(Turn((Remove((1, 2, 3, 4)), *adds), step=True)))
    else:
        decode_turn(line.share())
    line.digest.add(sampled)


def seconds_per_turn(work: Any, turns: int) -> float:
    began = time.perf_counter()
    for _ in range(turns):
        work()
    return (time.perf_counter() - began) / turns


if __name__ == "__main__":
    sys.exit(main())
