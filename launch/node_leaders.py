"""Who tells whom that it lives, and who judges whose silence, in a world of many nodes.

    rank ──► its node's leader (the lowest rank of the host) ── one bundle per node and interval ──► head
      └────► its node's deputy (the next one): sends the bundle while the leader is silent

The head leads its own node. The head judges the ranks of its node and the leaders of all others; a leader judges its
members, the deputy does so while the leader is silent; rank 1 judges the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Duties:
    """Of one rank."""

    leader: int
    deputy: int | None
    """None on the head's node, and where a rank is alone on its host."""
    listeners: tuple[int, ...]
    """Ranks that its own heartbeats go to."""
    members: tuple[int, ...]
    """The ranks of its host, itself included, ascending."""
    judged: tuple[int, ...]
    """Ranks whose silence it judges (as a deputy: while the leader is silent)."""
    is_leader: bool
    is_deputy: bool


def duties_of(rank: int, hosts: Sequence[str]) -> Duties:
    """`hosts`: of all ranks."""
    members = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
    leader = members[0]
    deputy = members[1] if leader != 0 and len(members) > 1 else None
    listeners = [leader] if deputy is None else [leader, deputy]
    judged: set[int] = set()
    if rank in (leader, deputy):
        judged.update(members[1:])
    if rank == 0:
        first: dict[str, int] = {}
        for other, host in enumerate(hosts):
            first.setdefault(host, other)
        judged.update(first.values())
        listeners += [1] if len(hosts) > 1 else []
    if rank == 1:
        judged.add(0)
    judged.discard(rank)
    return Duties(
        leader, deputy, tuple(listeners), members, tuple(sorted(judged)),
        is_leader=rank == leader, is_deputy=rank == deputy,
    )  # fmt: skip
