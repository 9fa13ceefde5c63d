"""Ranks on nodes: how many nodes, how many ranks on each, and that no tensor-parallel group is torn without need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pekoe.launch.allocation import parse
from pekoe.launch.node_layout import NodeGroup, nodes_needed
from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.config.run import RunConfig


def layout(nodes: int, devices: int, allocation: str, *overrides: str) -> list[tuple[int, ...]]:
    config = from_yaml_text("", overrides) if overrides else RunConfig()
    config.cluster.n_nodes, config.cluster.n_gpus_per_node = nodes, devices
    groups = nodes_needed(config, parse(allocation))
    return [group.ranks_per_node for group in groups]


@pytest.mark.parametrize(
    ("nodes", "devices", "allocation", "expected"),
    [
        (1, 8, "hf:d1+fsdp:d1", (2,)),
        (2, 8, "hf:d1+fsdp:d1", (1, 1)),
        (2, 8, "hf:d8+fsdp:d8", (8, 8)),
        (2, 2, "hf:d1+fsdp:d2", (2, 1)),
        (2, 8, "hf:d1+fsdp:d2", (2, 1)),
        (3, 8, "hf:d1+fsdp:d3", (2, 1, 1)),
        (4, 8, "hf:d4|fsdp:d4", (1, 1, 1, 1)),
        (2, 8, "vllm:d2t2+megatron:d1t8", (8, 4)),
        (2, 8, "vllm:d1t4+megatron:d2t4", (8, 4)),
        (2, 8, "vllm:d2t4+megatron:d2t4", (8, 8)),
    ],
)
def test_ranks_lie_on_nodes(nodes: int, devices: int, allocation: str, expected: tuple[int, ...]) -> None:
    assert layout(nodes, devices, allocation) == [expected]


def test_trainers_and_rollouts_have_their_own_nodes() -> None:
    own = ["cluster.rollout_nodes.n_nodes=3", "cluster.rollout_nodes.n_gpus_per_node=2"]
    assert layout(1, 4, "hf:d5+fsdp:d4", *own) == [(4,), (2, 2, 1)]
    assert layout(2, 4, "hf:d3+fsdp:d4", "cluster.rollout_nodes.n_nodes=1") == [(2, 2), (3,)]


@pytest.mark.parametrize(
    ("nodes", "devices", "allocation", "overrides", "words"),
    [
        (3, 8, "hf:d1+fsdp:d1", [], r"cluster\.n_nodes: 3 nodes for 2 ranks.*allowed: <= 2"),
        (2, 2, "hf:d4+fsdp:d1", [], r"cluster\.n_nodes: 2 nodes of 2 devices for 5 ranks; allowed: >= 3"),
        (1, 8, "hf:d2|fsdp:d2", ["cluster.rollout_nodes.n_nodes=1"], "no rollout ranks apart"),
        (1, 8, "hf:d1+fsdp:d2", ["cluster.rollout_nodes.n_nodes=2"], r"cluster\.rollout_nodes\.n_nodes: 2.*<= 1"),
    ],
)
def test_what_does_not_fit_is_named(
    nodes: int, devices: int, allocation: str, overrides: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        layout(nodes, devices, allocation, *overrides)


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 40), st.integers(0, 20))
def test_every_rank_has_a_place_and_no_node_is_empty(nodes: int, devices: int, trainers: int, rollouts: int) -> None:
    world = trainers + rollouts
    if not nodes <= world <= nodes * devices:
        return
    text = f"fsdp:d{trainers}" + (f"+hf:d{rollouts}" if rollouts else "")
    (found,) = layout(nodes, devices, text)
    group = NodeGroup(found)
    assert (group.num_nodes, group.num_ranks) == (nodes, world)
    assert min(found) >= 1
    assert group.most_ranks <= devices
    assert list(found) == sorted(found, reverse=True)
