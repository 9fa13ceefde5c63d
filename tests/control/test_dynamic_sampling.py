"""Dynamic sampling: groups whose rewards are all equal are dropped, and replaced within a bound or not at all."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.admission import Admission
from pekoe.pipeline.control.controller import NothingToTrain
from pekoe.pipeline.control.group_table import GroupState, GroupTable, OutstandingGroup
from pekoe.pipeline.messages import Assign, PublishedGroup, Row

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_roles import Faults, World

BATCH = 3


def config(eta: int | None, *, shrink: bool = False, bound: int | None = None) -> RunConfig:
    made = RunConfig()
    made.train_dataset.batch_size = BATCH
    made.gconfig.n_samples = 2
    made.rollout.max_head_offpolicyness = eta
    made.rollout.dynamic_sampling = True
    made.rollout.dynamic_batch_size = shrink
    made.rollout.max_resampled_groups = bound
    made.cluster.progress_seconds = 20.0
    made.recover.freq_steps = 2
    return made


def is_odd(assign: Assign) -> bool:
    return assign.group % 2 == 1


@pytest.mark.parametrize("eta", [0, 1, 4, None])
@pytest.mark.parametrize("colocated", [False, True])
def test_dropped_groups_are_replaced_and_every_batch_is_whole(eta: int | None, colocated: bool) -> None:
    world = World(config(eta), 40, 6, num_rollout=2, colocated=colocated, faults=Faults(equal=is_odd))
    assert world.run() == "finished"
    consumed = [number for _, numbers in world.consumed for number in numbers]
    assert [len(numbers) for _, numbers in world.consumed] == [BATCH] * 6
    assert all(number % 2 == 0 for number in consumed)
    assert len(set(consumed)) == len(consumed)
    filtered = [loss.group for loss in world.losses.filtered]
    assert all(number % 2 == 1 for number in filtered)
    assert {loss.reason for loss in world.losses.filtered} == {"equal_rewards"}
    assert len(set(filtered)) == len(filtered)
    dropped = world.metrics[-1][1]["groups_total/rejected_equal_rewards"]
    assert 0 < dropped <= len(filtered)
    assert not world.losses.skipped


@pytest.mark.parametrize("eta", [0, 2, None])
def test_a_constant_reward_ends_at_the_bound_of_each_step(eta: int | None) -> None:
    """Ten steps of it: each drops at most as many groups as it may, then takes what comes."""
    world = World(config(eta, bound=4), 200, 10, num_rollout=2, faults=Faults(equal=lambda assign: True))
    assert world.run() == "finished"
    assert [len(numbers) for _, numbers in world.consumed] == [BATCH] * 10
    ended = [number for _, numbers in world.consumed for number in numbers]
    ended += [loss.group for loss in world.losses.filtered]
    assert len(set(ended)) == len(ended)
    assert 4 <= len(world.losses.filtered) <= 4 * 11
    assert {try_number for _, try_number in world.tries} == {0}


def test_a_bound_of_zero_drops_nothing() -> None:
    world = World(config(1, bound=0), 12, 4, faults=Faults(equal=lambda assign: True))
    assert world.run() == "finished"
    assert sorted(number for _, numbers in world.consumed for number in numbers) == list(range(12))
    assert not world.losses.filtered
    assert len(world.tries) == 12, "nothing was sampled again"


def test_the_data_may_end_while_groups_are_dropped() -> None:
    world = World(config(1), 12, 4, faults=Faults(equal=is_odd))
    assert world.run() == "finished"
    assert [len(numbers) for _, numbers in world.consumed] == [BATCH] * 2
    assert sorted(loss.group for loss in world.losses.filtered) == list(range(1, 12, 2))


def test_data_that_is_dropped_as_a_whole_is_an_error_that_names_the_key() -> None:
    world = World(config(1), 12, 4, faults=Faults(equal=lambda assign: True))
    with pytest.raises(NothingToTrain, match="dynamic_sampling"):
        world.run()


@pytest.mark.parametrize("eta", [0, 1, 4, None])
def test_without_replacement_steps_are_smaller_and_as_many(eta: int | None) -> None:
    world = World(config(eta, shrink=True), 30, 10, num_rollout=2, faults=Faults(equal=is_odd))
    assert world.run() == "finished"
    assert [version for version, _ in world.consumed] == list(range(1, 11))
    consumed = [number for _, numbers in world.consumed for number in numbers]
    assert sorted(consumed) == list(range(0, 30, 2))
    assert sorted(loss.group for loss in world.losses.filtered) == list(range(1, 30, 2))
    assert len(world.tries) == 30


@pytest.mark.parametrize("eta", [0, 2, None])
@pytest.mark.parametrize("colocated", [False, True])
def test_a_step_without_a_group_moves_the_version_and_nothing_else(eta: int | None, colocated: bool) -> None:
    world = World(config(eta, shrink=True), 30, 10, colocated=colocated, faults=Faults(equal=lambda assign: True))
    assert world.run() == "finished"
    assert world.consumed == [(version, []) for version in range(1, 11)]
    assert world.folder.committed[-1] == 10
    assert len(world.losses.filtered) == 30


@settings(max_examples=120, deadline=None)
@given(
    eta=st.integers(0, 4) | st.none(),
    batch=st.integers(1, 5),
    concurrent=st.integers(1, 30),
    drop=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_the_bound_on_staleness_holds_with_smaller_batches(
    eta: int | None, batch: int, concurrent: int, drop: float, seed: int
) -> None:
    """A batch and the dropped groups that it stands for are always `batch` groups; none is too old, all get their
    place in order of completion."""
    rng = random.Random(seed)
    admission, table = Admission(concurrent, batch, eta), GroupTable(eta, batch)
    next_group = version = num_dropped = num_used = num_consumed = 0
    for _ in range(3000):
        while admission.capacity() > 0 and len(table.ready) <= 3 * batch:
            admission.admit()
            table.admit(OutstandingGroup(next_group, 0, next_group, version, rank=0, since=0.0))
            next_group += 1
        chosen = table.choose(version)
        if chosen is not None:
            assert all(group.state is GroupState.READY for group in chosen)
            assert eta is None or all(version - row.min_version <= eta for g in chosen for row in g.rows)
            for group in chosen:
                table.remove(group.number)
            used = table.use_dropped(batch - len(chosen))
            assert len(chosen) + used == batch
            num_used, num_consumed, version = num_used + used, num_consumed + len(chosen), version + 1
            admission.version = version
            if version == 12:
                break
            continue
        unready = [g for g in table.groups.values() if g.state is not GroupState.READY]
        assert unready, "neither a batch nor anything that could complete one"
        group = rng.choice(unready)
        is_running = group.state is GroupState.RUNNING
        if is_running:
            admission.accept()
        if is_running and rng.random() < drop:
            table.drop(group.number)
            num_dropped += 1
        elif is_running and rng.random() < 0.5:
            assert table.finish(group.number, 0) is group
        else:
            row = Row(0, 0, 4, 2, 1.0, group.admitted_version, version, False)
            assert table.publish("s", PublishedGroup(group.number, 0, (row,))) is group
    assert version == 12
    assert num_dropped == num_used + len(table.dropped)
    assert num_consumed + num_used == 12 * batch
