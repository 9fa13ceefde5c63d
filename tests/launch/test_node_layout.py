"""Ranks on nodes: how many nodes, how many ranks on each, and that no tensor-parallel group is torn without need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pekoe.launch.allocation import parse
from pekoe.launch.node_layout import NodeGroup, nodes_needed, torn_instances, torn_warnings
from pekoe.launch.placement import Placement
from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.slurm import RolloutNodesConfig


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
        (2, 4, "vllm:d2t2+fsdp:d3", (3, 4)),
        (3, 4, "vllm:d2t4+fsdp:d2", (2, 4, 4)),
        (3, 3, "vllm:d1t4+fsdp:d3", (3, 3, 1)),
        (2, 4, "vllm:d2t3+fsdp:d2", (4, 4)),
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


def test_a_group_that_no_node_can_hold_is_named() -> None:
    def settings(nodes: int, devices: int, allocation: str) -> tuple[RunConfig, Placement]:
        config = RunConfig()
        config.cluster.n_nodes, config.cluster.n_gpus_per_node = nodes, devices
        return config, parse(allocation)

    whole = settings(2, 4, "vllm:d2t2+fsdp:d3")
    assert torn_instances(*whole) == ()
    assert torn_warnings(*whole) == []
    wide = settings(3, 3, "vllm:d1t4+fsdp:d3")
    assert torn_instances(*wide) == (("vllm", (3, 4, 5, 6)),)
    (sentence,) = torn_warnings(*wide)
    assert "ranks 3 to 6" in sentence
    own, placement = settings(1, 4, "vllm:d2t2+fsdp:d4")
    own.cluster.rollout_nodes = RolloutNodesConfig(n_nodes=2)
    assert torn_instances(own, placement) == ()


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 12), st.integers(1, 6), st.sampled_from((1, 2, 3, 4)))
def test_groups_are_torn_only_where_every_layout_tears_one(
    nodes: int, devices: int, trainers: int, instances: int, tensor: int
) -> None:
    world = trainers + instances * tensor
    if not nodes <= world <= nodes * devices:
        return
    config = RunConfig()
    config.cluster.n_nodes, config.cluster.n_gpus_per_node = nodes, devices
    torn = torn_instances(config, parse(f"fsdp:d{trainers}+vllm:d{instances}t{tensor}"))
    inside = {trainers + i for i in range(1, instances * tensor) if i % tensor}
    reachable = {0}
    for _ in range(nodes):
        reachable = {
            end for begin in reachable for end in range(begin + 1, min(begin + devices, world) + 1) if end not in inside
        }
    if tensor <= devices:
        assert (world in reachable) == (torn == ())


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
