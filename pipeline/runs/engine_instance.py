"""Where the ranks of one engine meet: its leader binds a port, holds it, and tells the others where it is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pekoe.pipeline.messages import Endpoint
from pekoe.pipeline.rollout.engine import Instance
from pekoe.pipeline.runs.context import RunContext


def join_instance(context: RunContext) -> Instance:
    """This rank's place in its engine. Of several ranks it blocks until the leader's word has come."""
    assert context.ranks.rollout is not None
    rank = context.world.rank
    ranks = next(ranks for ranks in context.ranks.rollout.instances if rank in ranks)
    if len(ranks) == 1:
        return Instance()
    store = meet(context, ranks, "engine")
    name = f"{context.run.path}/{context.world.attempt}/{ranks[0]}"
    return Instance(len(ranks), ranks.index(rank), PrefixStore(name, store), context.world.address)


def meet(context: RunContext, ranks: Sequence[int], purpose: str) -> Store:
    """A store that the first of `ranks` serves to the others. queue.Empty when its word does not come within
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
