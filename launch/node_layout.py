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


def _spread(
    ranks: Sequence[int], num_nodes: int, most: int, tensor_groups: Sequence[tuple[int, int]], key: str
) -> tuple[int, ...]:
    """Ranks per node: equally many where that tears no tensor-parallel group, else full nodes first."""
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
    layout: list[int] = []
    for nodes_after in reversed(range(num_nodes)):
        layout.append(min(most, count - sum(layout) - nodes_after))
    return tuple(layout)


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
