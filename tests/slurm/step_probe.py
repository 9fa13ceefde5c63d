"""A rank of a probe: rank 0 prints, as JSON, what each rank of its world sees. `die`: the last rank is
killed; `wait`: all of them wait."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

from mpi4py import MPI

world = MPI.COMM_WORLD
seen = {
    "rank": world.rank,
    "host": socket.gethostname(),
    "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "note": os.environ.get("PROBE_NOTE"),
}
rows = world.gather(seen)
if rows is not None:
    print(json.dumps({"library": MPI.Get_library_version(), "ranks": rows}), flush=True)
if {"die", "wait"} & set(sys.argv[1:]):
    if "die" in sys.argv and world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
world.Barrier()
