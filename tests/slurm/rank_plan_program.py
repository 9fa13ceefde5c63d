"""Started as a rank by a real launcher: prints its plan and what MPI says of it, one JSON line, `plan {…}`."""

from __future__ import annotations

import json
import os
import socket
import sys

from pekoe.launch import environment, rank_environment
from pekoe.launch.allocation import parse
from pekoe.launch.rendezvous import own_address
from pekoe.pipeline.config.run import RunConfig


def main(world: str, device: str) -> None:
    config = RunConfig()
    config.cluster.device = device
    facts = environment.read(os.environ)
    plan = rank_environment.plan(os.environ, parse(world), config, facts)
    rank_environment.enter(plan)
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    ports = [plan.ports.first, plan.ports.last] if plan.ports else None
    told = {
        "mpi": [ranks.Get_rank(), ranks.Get_size()],
        "facts": [facts.rank, facts.size],
        "local": [facts.local_rank, facts.local_size],
        "host": [facts.host, socket.gethostname()],
        "node": facts.node_rank,
        "launcher": facts.launcher,
        "nodes": list(facts.job_nodes),
        "device": plan.device and [plan.device.name, plan.device.ordinal],
        "interface": plan.interface and plan.interface.name,
        "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
        "address": own_address() if facts.several_hosts else None,
        "cache": plan.variables["TRITON_CACHE_DIR"],
        "ports": ports,
        "torch": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "executable": sys.executable,
    }
    everything = ranks.gather(told)
    if ranks.Get_rank() == 0:
        for one in everything or []:
            print("plan", json.dumps(one), flush=True)


main(*sys.argv[1:])
