"""One rank of an instance, with its line alone: takes part in turns until the leader says that it is over. At `differ`
rank 1 takes itself to have sampled another token.

python lockstep_rank.py RANK SIZE PORT      PORT is 0 for the leader, which prints the one that it has bound
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from pekoe.pipeline.rollout.engine import Instance
from pekoe.pipeline.rollout.engines.vllm.lockstep import InstanceError, Lockstep


def say(*words: object) -> None:
    """One line in one write: `print` writes word by word where Python is unbuffered, and threads speak here."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def lost(error: BaseException) -> None:
    say("lost", error)
    os._exit(3)


def main() -> None:
    rank, size, port = map(int, sys.argv[1:])
    store = TCPStore(
        "127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    if rank == 0:
        say(store.port)
    line = Lockstep(Instance(size, rank, store), lost, 60.0)
    say("there")
    if rank == 0:
        for text in sys.stdin:
            words = text.split()
            began = time.perf_counter()
            for _ in range(int(words[1])):
                line.share(words[0].encode())
            say("took", (time.perf_counter() - began) / int(words[1]))
        line.share(b"over")
    else:
        while (commands := line.share()) != b"over":
            if commands == b"differ" and rank == 1:
                line.digest.add([(7, 3, -1.0)])
    line.close()
    say("over", line.turn)


if __name__ == "__main__":
    try:
        main()
    except InstanceError as failure:
        lost(failure)
