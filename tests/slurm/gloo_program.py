"""Two trainer ranks on two nodes: an all-reduce by gloo over the interface of the plan, MPI alone for the meeting."""

from __future__ import annotations

import os

from pekoe.launch import rank_environment
from pekoe.launch.allocation import parse
from pekoe.launch.rendezvous import listen, split_address
from pekoe.pipeline.config.run import RunConfig

config = RunConfig()
config.cluster.device = "cpu"
plan = rank_environment.plan(os.environ, parse("fsdp:d2"), config)
rank_environment.enter(plan)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

owner, endpoint = listen(2) if plan.facts.rank == 0 else (None, "")
host, port = split_address(MPI.COMM_WORLD.bcast(endpoint))
store = dist.TCPStore(
    host, port, is_master=owner is not None, master_listen_fd=owner.detach() if owner else None, wait_for_workers=False
)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
number = torch.tensor([float(plan.facts.rank + 1)])
dist.all_reduce(number)
# One write: ranks share the output, and `print` writes text and end apart where Python is unbuffered.
os.write(1, f"sum {number.item():.0f} over {os.environ['GLOO_SOCKET_IFNAME']} at {host}\n".encode())
MPI.COMM_WORLD.Barrier()
dist.destroy_process_group()
del store
