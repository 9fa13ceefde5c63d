"""Rollout arrays by files: prompts go out as leases, notices come back; nothing but the run directory is shared.

    controller ─offer─► LeaseBoard ─► offered/FILE ──rename──► WORLD/held/FILE ─► LeaseHolder ─► rollout ranks
                (head, a thread)        │  state.json: version, weights, starving, cancelled, outcome │ look
        ▲                               ▼                                                            ▼
        └──messages── poll ◄── inbox/WORLD/ ◄──────────────── tell (a file of notices, durable) ◄── shards are published
                       ▲
                       └ WORLD/world.json: counter, slots, which leases it holds (beat)

The head waits for nobody: a world that says nothing for `lease_seconds` of the head's own clock is dead, its folder is
moved away (nothing can be claimed into it any more) and what it held is offered again. A world waits for nobody either:
it claims what is there. Whatever the files say or fail to say, a lease that is neither offered nor held by a live world
is offered again after a while, under a new serial number; an older serial that turns up is cancelled.
"""
