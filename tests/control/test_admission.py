"""Admission: the numbers of the formula, and the staleness bound under random interleavings."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.control.admission import Admission
from pekoe.pipeline.control.group_table import GroupState, GroupTable, OutstandingGroup
from pekoe.pipeline.messages import PublishedGroup, Row


@pytest.mark.parametrize(
    ("limits", "state", "capacity"),
    [
        ((10, 4, 2), {}, 10),
        ((100, 4, 2), {}, 12),
        ((100, 4, 2), {"version": 5}, 32),
        ((10, 4, 2), {"running": 3}, 7),
        ((20, 4, 2), {"accepted": 5}, 7),
        ((5, 2, 10), {"running": 3}, 2),
        ((3, 2, 1), {"running": 10}, -7),
        ((20, 8, 3), {"accepted": 15}, 17),
        ((7, 4, None), {"accepted": 1000}, 7),
    ],
)
def test_capacity_numbers(limits: tuple[int, int, int | None], state: dict[str, int], capacity: int) -> None:
    assert Admission(*limits, **state).capacity() == capacity


def test_rejected_groups_give_their_slot_back() -> None:
    admission = Admission(20, 8, 3)
    for _ in range(20):
        admission.admit()
    for _ in range(15):
        admission.accept()
    for _ in range(5):
        admission.reject()
    assert admission.capacity() == 17


@pytest.mark.parametrize("version", [0, 5, 10, 50])
@pytest.mark.parametrize("eta", [0, 1, 2, 3])
def test_restored_capacity_is_that_of_an_uninterrupted_run(version: int, eta: int) -> None:
    restored = Admission(1000, 4, eta, version=version, accepted=version * 4)
    assert restored.capacity() == Admission(1000, 4, eta).capacity()


@settings(max_examples=120, deadline=None)
@given(
    eta=st.integers(0, 4),
    batch=st.integers(1, 5),
    concurrent=st.integers(1, 30),
    reject=st.floats(0, 0.5),
    seed=st.integers(0, 10**6),
)
def test_no_token_is_ever_too_old_and_no_group_is_used_twice(
    eta: int, batch: int, concurrent: int, reject: float, seed: int
) -> None:
    """Random completion, rejection and publication orders against the bound at consumption."""
    rng = random.Random(seed)
    admission, table = Admission(concurrent, batch, eta), GroupTable(eta, batch)
    consumed: Counter[int] = Counter()
    next_group, version = 0, 0
    for _ in range(2000):
        while admission.capacity() > 0:
            admission.admit()
            table.admit(OutstandingGroup(next_group, 0, next_group, version, rank=0, since=0.0))
            next_group += 1
        chosen = table.choose(version)
        if chosen is not None:
            assert len(chosen) == batch
            assert all(version - row.min_version <= eta for g in chosen for row in g.rows)
            for group in chosen:
                consumed[group.number] += 1
                table.remove(group.number)
            version += 1
            admission.version = version
            if version == 12:
                break
            continue
        unready = [g for g in table.groups.values() if g.state is not GroupState.READY]
        assert unready, "neither a batch nor anything that could complete one"
        group = rng.choice(unready)
        if group.state is GroupState.RUNNING and rng.random() < reject:
            admission.reject()
            table.remove(group.number)
        elif group.state is GroupState.RUNNING and rng.random() < 0.7:
            assert table.finish(group.number, 0) is group
            admission.accept()
        else:
            if group.state is GroupState.RUNNING:
                admission.accept()
            row = Row(0, 0, 4, 2, 1.0, group.admitted_version, version, False)
            assert table.publish("s", PublishedGroup(group.number, 0, (row,))) is group
    assert version == 12
    assert set(consumed.values()) == {1}


def test_flush_is_asked_for_only_when_it_completes_the_batch() -> None:
    table = GroupTable(eta=2, batch=3)
    for number in range(5):
        table.admit(OutstandingGroup(number, 0, number, 0, rank=number % 2, since=0.0))
    table.finish(0, 0)
    table.finish(1, 0)
    assert table.ranks_to_flush(0) == set()
    table.finish(2, 0)
    assert table.ranks_to_flush(0) == {0, 1}
    table.publish("s", PublishedGroup(1, 0, ()))
    assert table.ranks_to_flush(0) == set(), "both ranks were asked for what they hold"
    table.finish(3, 0)
    table.remove(2)
    assert table.ranks_to_flush(0) == {1}, "group 3 finished after its rank was asked"


def test_late_messages_of_an_earlier_try_are_ignored() -> None:
    table = GroupTable(eta=None, batch=1)
    table.admit(OutstandingGroup(7, 1, 7, 0, rank=0, since=0.0))
    assert table.finish(7, 0) is None
    assert table.publish("s", PublishedGroup(7, 0, ())) is None
    assert table.publish("s", PublishedGroup(7, 1, ())) is not None
    assert table.publish("t", PublishedGroup(7, 1, ())) is None
