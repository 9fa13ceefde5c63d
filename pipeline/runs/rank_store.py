"""A store where some ranks meet: the first of them binds a port, holds it, and tells the others where it is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from pekoe.pipeline.messages import Endpoint
from pekoe.pipeline.runs.context import RunContext


def meet(context: RunContext, ranks: Sequence[int], purpose: str) -> Store:
    """The store of these ranks, this one among them. queue.Empty when the first one's word does not come within
    `cluster.setup_seconds`."""
    world = context.world
    limit = timedelta(seconds=context.config.cluster.setup_seconds)
    if world.rank == ranks[0]:
        owner, address = world.listen()
        host, _, port = address.rpartition(":")
        store = TCPStore(
            host, int(port), len(ranks), is_master=True, timeout=limit, wait_for_workers=False,
            master_listen_fd=owner.detach(),
        )  # fmt: skip
        for rank in ranks[1:]:
            world.post.send(rank, Endpoint(purpose, address))
        return store
    _, message = world.post.inbox(Endpoint).get(timeout=limit.total_seconds())
    assert isinstance(message, Endpoint)
    host, _, port = message.address.rpartition(":")
    return TCPStore(host, int(port), len(ranks), is_master=False, timeout=limit)
