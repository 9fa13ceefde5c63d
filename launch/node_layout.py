"""Which nodes a world needs, and how many ranks stand on each of them. Pure arithmetic; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pekoe.launch.placement import Placement
    from pekoe.pipeline.config.run import RunConfig


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind: a component of the Slurm job. World ranks lie on them in order, node after node."""

    ranks_per_node: tuple[int, ...]
    """One number for each node that ranks run on."""
    spare_nodes: int = 0
    """Nodes more, to take the place of failed ones."""

    @property
    def num_nodes(self) -> int:
        """Nodes that ranks run on."""
        return len(self.ranks_per_node)

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def most_ranks(self) -> int:
        """On one node: what the allocation asks for on each."""
        return max(self.ranks_per_node)

    @property
    def is_even(self) -> bool:
        """Every node has equally many ranks."""
        return len(set(self.ranks_per_node)) == 1


def nodes_needed(config: RunConfig, placement: Placement) -> tuple[NodeGroup, ...]:
    """One group of nodes; with `cluster.rollout_nodes` two: the trainers, then the rollout ranks.

    ValueError when the ranks do not fit, or a node would have none.
    """
    cluster = config.cluster
    tensor_groups = _tensor_groups(placement)
    if cluster.rollout_nodes is None:
        ranks = range(placement.world_size)
        layout = _spread(ranks, cluster.n_nodes, cluster.n_gpus_per_node, tensor_groups, "cluster.n_nodes")
        return (NodeGroup(layout, cluster.spare_nodes),)
    own = cluster.rollout_nodes
    if not placement.trainer_ranks or set(placement.trainer_ranks) & set(placement.rollout_ranks):
        raise ValueError(
            f"cluster.rollout_nodes: given, but allocation {placement} has no rollout ranks apart from its trainer "
            "ranks; allowed: a split allocation such as hf:d4+fsdp:d4, or cluster.rollout_nodes: null"
        )
    devices = own.n_gpus_per_node or cluster.n_gpus_per_node
    trainers = _spread(
        placement.trainer_ranks, cluster.n_nodes, cluster.n_gpus_per_node, tensor_groups, "cluster.n_nodes"
    )
    rollouts = _spread(placement.rollout_ranks, own.n_nodes, devices, tensor_groups, "cluster.rollout_nodes.n_nodes")
    return NodeGroup(trainers, cluster.spare_nodes), NodeGroup(rollouts)


def torn_instances(config: RunConfig, placement: Placement) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Tensor-parallel groups that lie on several nodes: (engine, ranks). Their collectives cross the network."""
    borders, first = [], 0
    for group in nodes_needed(config, placement):
        borders += [first + border for border in accumulate(group.ranks_per_node)]
        first = borders[-1]
    torn = []
    for part in placement.parts:
        size = part.dimensions.tensor
        for start in range(part.ranks[0], part.ranks[-1] + 1, size):
            if any(start < border < start + size for border in borders):
                torn.append((part.engine, tuple(range(start, start + size))))
    return tuple(torn)


def torn_warnings(config: RunConfig, placement: Placement) -> list[str]:
    """One sentence for each engine of which tensor-parallel groups lie on several nodes."""
    torn = torn_instances(config, placement)
    return [
        f"allocation: {len(groups)} tensor-parallel group(s) of {engine!r} lie on several nodes (the first: ranks "
        f"{groups[0][0]} to {groups[0][-1]}), which is slow; better: a t that divides the ranks of a node"
        for engine in dict.fromkeys(engine for engine, _ in torn)
        if (groups := [ranks for name, ranks in torn if name == engine])
    ]


def _spread(
    ranks: Sequence[int], num_nodes: int, most: int, tensor_groups: Sequence[tuple[int, int]], key: str
) -> tuple[int, ...]:
    """Ranks per node: equally many where that tears no tensor-parallel group, else full nodes first but for the groups
    that fit into a node."""
    count = len(ranks)
    if count < num_nodes:
        raise ValueError(f"{key}: {num_nodes} nodes for {count} ranks leaves nodes empty; allowed: <= {count}")
    if count > num_nodes * most:
        raise ValueError(
            f"{key}: {num_nodes} nodes of {most} devices for {count} ranks; allowed: >= {-(-count // most)}"
        )
    if count % num_nodes == 0:
        even = (count // num_nodes,) * num_nodes
        if not _tears(even, ranks[0], tensor_groups):
            return even
    fitting = [group for group in tensor_groups if group[1] <= most]
    return _whole_groups(ranks, num_nodes, most, fitting) or _whole_groups(ranks, num_nodes, most, ())


def _whole_groups(
    ranks: Sequence[int], num_nodes: int, most: int, tensor_groups: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Full nodes first, with borders only where no group is; empty when the ranks do not fit so."""
    inside = {rank for start, size in tensor_groups for rank in range(start + 1, start + size)}
    borders = [index for index in range(1, len(ranks) + 1) if ranks[0] + index not in inside]
    if len(borders) < num_nodes:
        return ()
    layout: list[int] = []
    begin = at = 0
    for nodes_after in reversed(range(num_nodes)):
        last = len(borders) - 1 - nodes_after
        while at <= last and borders[at] - begin <= most:
            at += 1
        if at == 0 or borders[at - 1] <= begin:
            return ()
        layout.append(borders[at - 1] - begin)
        begin = borders[at - 1]
    return tuple(layout) if begin == len(ranks) else ()


def _tensor_groups(placement: Placement) -> list[tuple[int, int]]:
    """First rank and size of every tensor-parallel group: neighbours in the order of ranks."""
    groups = []
    for part in placement.parts:
        size = part.dimensions.tensor
        groups += [(part.ranks[index], size) for index in range(0, part.size, size) if size > 1]
    return groups


def _tears(layout: tuple[int, ...], first: int, tensor_groups: Sequence[tuple[int, int]]) -> bool:
    """Does a border between two nodes run through a tensor-parallel group?"""
    borders = [first + border for border in accumulate(layout[:-1])]
    return any(start < border < start + size for border in borders for start, size in tensor_groups)
