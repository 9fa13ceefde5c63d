"""Heartbeats on many nodes: one bundle per node for the head, every rank judged by somebody, one file per node."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import msgspec
from worlds import StartedWorld

from pekoe.launch.node_leaders import duties_of
from pekoe.launch.pulse import PHASE_LENGTH, RANKS_PER_MESSAGE, Pulse, SilentRankError, _short
from pekoe.launch.world import WorldSettings
from pekoe.pipeline.messages import HeardRank, Heartbeat, NodeHeartbeats, ThreadPhase
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory


@pytest.mark.parametrize("layout", ["packed", "round robin", "one rank a node", "one node", "head alone"])
def test_every_rank_is_judged_and_the_head_hears_few(layout: str) -> None:
    nodes, per_node = {"one rank a node": (40, 1), "one node": (1, 40)}.get(layout, (40, 8))
    hosts = [
        f"node-{rank // per_node if layout != 'round robin' else rank % nodes}" for rank in range(nodes * per_node)
    ]
    if layout == "head alone":
        hosts[0] = "login"
    duties = [duties_of(rank, hosts) for rank in range(len(hosts))]
    judges: dict[int, set[int]] = {rank: set() for rank in range(len(hosts))}
    for rank, duty in enumerate(duties):
        for judged in duty.judged:
            judges[judged].add(rank)
    for rank, duty in enumerate(duties):
        assert judges[rank] - {rank}, f"nobody judges rank {rank}"
        assert len(duty.listeners) <= 2
        assert rank == 0 or not duty.is_leader or 0 in judges[rank], "the head judges leaders"
        for judge in judges[rank]:
            assert (judge == 0 and duty.is_leader) or judge in duty.listeners, "who judges must hear"
        if duty.deputy is not None:
            assert duties[duty.deputy].is_deputy
            assert duty.deputy in duty.listeners
    to_head = Counter(listener for duty in duties for listener in duty.listeners)[0]
    own = hosts.count(hosts[0])
    assert to_head == own, "beside them one bundle from each leader"
    assert sum(duty.is_leader for duty in duties) == len(set(hosts))


def test_a_bundle_is_far_below_the_limit_of_a_message() -> None:
    threads = tuple(ThreadPhase("x" * 100, "y" * 1000, 1.0) for _ in range(20))
    gauges = {f"gauge-{number}": 1.0 for number in range(200)}
    beat = Heartbeat(1, "trainer+rollout", "h" * 255, 1, 1, "z" * 5000, 1.0, 1, gauges, threads)
    bundle = NodeHeartbeats(tuple(HeardRank(_short(beat), 1.0) for _ in range(RANKS_PER_MESSAGE)))
    assert len(msgspec.msgpack.encode(bundle)) < 1 << 18
    assert bundle.ranks[0].heartbeat.phase == "z" * PHASE_LENGTH


def start(tmp_path: Path) -> tuple[StartedWorld, dict[int, int]]:
    """Six ranks on three hosts, the head and rank 1 on the first; their pids."""
    run = tmp_path / "run"
    run.mkdir()
    world = StartedWorld(run, "nodes", 6)
    world.wait_until_said(6)
    deadline = time.monotonic() + 60
    while not (heard_by_head(world) and len(heard_by_head(world)[-1]) == 6) and time.monotonic() < deadline:
        time.sleep(0.05)
    return world, {said["rank"]: said["pid"] for said in world.said() if "pid" in said}


def heard_by_head(world: StartedWorld) -> list[dict[int, int]]:
    return [{int(rank): count for rank, count in s["heard"].items()} for s in world.said() if "heard" in s]


def only_record(world: StartedWorld) -> dict[str, Any]:
    ended = world.finish()
    assert ended.code == 1, ended.output
    (record,) = ended.records
    return record


def test_a_silent_member_is_judged_by_its_leader(tmp_path: Path) -> None:
    """Before that there is one file a node, and the head has heard of all ranks."""
    world, pids = start(tmp_path)
    time.sleep(0.5)
    run = RunDirectory(world.run)
    assert sorted(path.name for path in run.heartbeats.iterdir()) == [f"node-node-{n}.json" for n in range(3)]
    assert [(item.heartbeat.rank, item.heartbeat.pid) for item in read_heartbeats(run)] == sorted(pids.items())
    assert heard_by_head(world)[-1].keys() == pids.keys()
    os.kill(pids[5], signal.SIGSTOP)
    record = only_record(world)
    assert record["rank"] == 4, "its leader says so"
    assert "SilentRankError: rank 5 (rollout, node-2) has sent no heartbeat for" in record["error"]
    assert "(cluster.silence_seconds is 2.0)" in record["error"]
    assert "is in state T (stopped)" in record["stacks"]["5"]


def test_a_silent_leader_is_judged_by_the_head_and_hides_nobody(tmp_path: Path) -> None:
    world, pids = start(tmp_path)
    os.kill(pids[2], signal.SIGSTOP)
    before = heard_by_head(world)[-1]
    record = only_record(world)
    assert record["rank"] == 0
    assert "SilentRankError: rank 2 (rollout, node-1) has sent no heartbeat for" in record["error"]
    gained = {rank: count - before[rank] for rank, count in heard_by_head(world)[-1].items()}
    assert gained[3] >= gained[2] + 3, "rank 3 tells of itself while its leader is silent"


def judge(silence_seconds: float) -> Pulse:
    """Of rank 1, which it heard at 99.5; its own last look was at 100."""
    pulse = Pulse.__new__(Pulse)
    state = SimpleNamespace(run=None)
    pulse.world = SimpleNamespace(  # type: ignore[assignment]
        settings=WorldSettings(silence_seconds=silence_seconds), hosts=("a", "a"), state=state,
        stacks_of=lambda ranks: {},
    )  # fmt: skip
    pulse.duties = SimpleNamespace(is_deputy=False, judged=(1,))  # type: ignore[assignment]
    pulse.newest, pulse._heard, pulse._spared, pulse._looked = {}, {1: 99.5}, {}, 100.0
    return pulse


@pytest.mark.parametrize("pause", [1.8, 2.9, 4.9])
def test_a_rank_that_stood_still_counts_only_the_time_in_which_it_looked(pause: float) -> None:
    """Shorter than what makes it begin anew: the machine stalled, and nobody could send."""
    pulse = judge(3.0)
    for seconds in (pause, pause + 1.0):
        pulse._look_for_silence(100.0 + seconds)
    with pytest.raises(SilentRankError, match=r"rank 1 .* has sent no heartbeat"):
        pulse._look_for_silence(100.0 + pause + 2.0)


def test_a_judge_that_is_always_late_still_finds_a_dead_rank() -> None:
    """Within the limit and one pause."""
    pulse = judge(60.0)
    for now in range(109, 190, 9):
        pulse._look_for_silence(float(now))
    with pytest.raises(SilentRankError, match=r"rank 1 .* has sent no heartbeat"):
        pulse._look_for_silence(199.0)
