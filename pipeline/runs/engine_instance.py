"""Which ranks make an engine together, and where they meet."""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore

from pekoe.pipeline.rollout.engine import Instance
from pekoe.pipeline.runs.context import RunContext
from pekoe.pipeline.runs.rank_store import meet


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
