"""Notices per second that one rank takes through the post office, against mpi4py's pickled messages.

    python scripts/bench/postoffice.py [--quick] [--ranks N]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from bench_result import report

TARGET = 5000.0


def measure(num_notices: int) -> None:
    """One rank of the measurement."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    from pekoe.launch.postoffice import PostOffice
    from pekoe.pipeline.messages import Published, PublishedGroup, Row

    world = MPI.COMM_WORLD
    post = PostOffice(world)
    rows = tuple(Row(row, row, 1000, 800, 0.5, 3, 4, False) for row in range(8))
    message = Published("shards/rank-1/000001.h5", (PublishedGroup(1, 0, rows),))
    total = num_notices * (world.size - 1)
    world.Barrier()
    began = time.perf_counter()
    if world.rank == 0:
        box = post.inbox(Published)
        while box.qsize() < total:
            if not post.pump():
                time.sleep(5e-5)
        office = total / (time.perf_counter() - began)
    else:
        for number in range(num_notices):
            post.send(0, message)
            if number % 100 == 0:
                post.pump()
        post.drain(300)
    world.Barrier()
    began = time.perf_counter()
    if world.rank == 0:
        for _ in range(total):
            world.recv()
        pickled = total / (time.perf_counter() - began)
        print(json.dumps({"office": office, "pickled": pickled}), flush=True)
    else:
        for _ in range(num_notices):
            world.send(message, 0)
    world.Barrier()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        measure(arguments.rank_of)
        return 0
    from pekoe.launch.local import find_mpiexec, mpiexec_arguments

    num_notices = 5_000 if arguments.quick else 50_000
    program = [str(Path(__file__).resolve()), "--rank-of", str(num_notices)]
    command = mpiexec_arguments(find_mpiexec(), arguments.ranks, program)
    output = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    rates = json.loads(output.splitlines()[-1])
    print(
        f"post office: {rates['office']:.0f} notices/s into one rank; "
        f"pickled blocking messages: {rates['pickled']:.0f}/s"
    )
    figures = {
        "notices_per_second": round(rates["office"], 1),
        "pickled_per_second": round(rates["pickled"], 1),
        "ratio": round(rates["office"] / rates["pickled"], 3),
    }
    targets = {"notices_per_second": (f">= {TARGET}", lambda rate: rate >= TARGET)}
    return 0 if report("postoffice", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
