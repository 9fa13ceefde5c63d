from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.data.cursor import Cursor, epoch_order
from pekoe.pipeline.records import epoch_and_position, group_number


def drain(cursor: Cursor, how: str = "consumed") -> list[tuple[int, int]]:
    admitted = []
    while (item := cursor.admit()) is not None:
        admitted.append(item)
        cursor.close(item[0], how)
    return admitted


def uninterrupted(num_examples: int, seed: int, epochs: int, shuffle: bool = True) -> list[tuple[int, int]]:
    """The sequential model: every position once, in order."""
    return [
        (group_number(epoch, position), int(example))
        for epoch in range(epochs)
        for position, example in enumerate(epoch_order(num_examples, seed, epoch, shuffle))
    ]


def reload(cursor: Cursor, num_examples: int, seed: int, epochs: int, shuffle: bool = True) -> Cursor:
    state = json.loads(json.dumps(cursor.state()))
    fresh = Cursor(num_examples, seed, shuffle, epochs)
    fresh.restore(state)
    return fresh


def test_each_epoch_is_another_permutation_of_all_examples() -> None:
    orders = [epoch_order(50, 3, epoch, True) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(50))
    assert len({tuple(order) for order in orders}) == 3
    assert tuple(epoch_order(50, 4, 0, True)) != tuple(orders[0])
    assert list(epoch_order(5, 3, 1, False)) == [0, 1, 2, 3, 4]


def test_the_order_is_pinned() -> None:
    # A change here would reorder the data of every run that is resumed.
    assert epoch_order(8, 1, 0, True).tolist() == PINNED
    assert epoch_order(8, 1, 0, True).dtype == np.int64


PINNED = [3, 5, 2, 7, 0, 6, 1, 4]


@pytest.mark.parametrize("cut", [30, 40, 50, 51, 99, 100])
def test_a_cut_between_batches_changes_nothing(cut: int) -> None:
    cursor = Cursor(50, seed=5, epochs=2)
    seen = []
    for _ in range(cut):
        item = cursor.admit()
        assert item is not None
        seen.append(item)
        cursor.close(item[0], "consumed")
    assert seen + drain(reload(cursor, 50, 5, 2)) == uninterrupted(50, 5, 2)


def test_what_was_in_flight_comes_first_and_what_was_closed_never() -> None:
    cursor = Cursor(10, seed=2, epochs=2)
    items = [item for _ in range(8) if (item := cursor.admit())]
    for i in (1, 2, 5):
        cursor.close(items[i][0], "consumed")
    again = drain(reload(cursor, 10, 2, 2))
    assert again[:5] == [items[i] for i in (0, 3, 4, 6, 7)]
    assert sorted(again + [items[i] for i in (1, 2, 5)]) == uninterrupted(10, 2, 2)


def test_state_is_small_when_the_head_of_the_line_is_stuck() -> None:
    cursor = Cursor(100_000, seed=1)
    stuck = cursor.admit()
    for _ in range(5000):
        item = cursor.admit()
        assert item is not None
        cursor.close(item[0], "consumed")
    assert stuck is not None
    assert len(json.dumps(cursor.state())) < 300
    assert reload(cursor, 100_000, 1, 1).admit() == stuck


def test_a_skipped_example_is_passed_over_in_later_epochs_and_after_a_resume() -> None:
    cursor = Cursor(4, seed=1, epochs=3)
    first = cursor.admit()
    assert first is not None
    cursor.close(first[0], "skipped")
    later = drain(reload(cursor, 4, 1, 3))
    assert first[1] not in [example for _, example in later]
    assert len(later) == 3 * 3


def test_an_endless_cursor_ends_when_every_example_is_skipped() -> None:
    cursor = Cursor(3, seed=1, epochs=None)
    assert cursor.remaining() == math.inf
    assert len(drain(cursor, "skipped")) == 3
    assert cursor.remaining() == 0


def test_what_was_in_flight_when_its_example_was_skipped_is_issued_again_after_a_resume() -> None:
    """An example of the second epoch was admitted before its first pass was given up."""
    cursor = Cursor(2, seed=1, epochs=2)
    items = [item for _ in range(4) if (item := cursor.admit())]
    for group, _ in items[:2]:
        cursor.close(group, "skipped")
    fresh = reload(cursor, 2, 1, 2)
    assert fresh.owed() == [group for group, _ in items[2:]]
    assert fresh.remaining() == 2
    assert fresh.admit() == items[2]
    again = reload(fresh, 2, 1, 2)
    assert drain(again) == items[2:]
    assert again.remaining() == 0
    assert again.owed() == []


def test_wrong_calls_are_refused() -> None:
    cursor = Cursor(5, seed=1)
    item = cursor.admit()
    assert item is not None
    with pytest.raises(ValueError, match="how: 'lost'"):
        cursor.close(item[0], "lost")
    cursor.close(item[0], "filtered")
    with pytest.raises(ValueError, match="not in flight"):
        cursor.close(item[0], "consumed")
    with pytest.raises(ValueError, match="not one of 5 examples"):
        cursor.close(group_number(0, 5), "consumed")
    with pytest.raises(ValueError, match="num_examples is 6, but the state was saved with 5"):
        Cursor(6, seed=1).restore(cursor.state())
    with pytest.raises(ValueError, match="seed is 2"):
        Cursor(5, seed=2).restore(cursor.state())


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_position_ends_exactly_once_over_any_history_of_kills(data: st.DataObject) -> None:
    num_examples = data.draw(st.integers(1, 12))
    epochs = data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 5))
    skips_allowed = data.draw(st.booleans())
    cursor = Cursor(num_examples, seed, True, epochs)
    saved, saved_ends, saved_flight = cursor.state(), {}, []
    ends: dict[int, str] = {}
    flight: list[tuple[int, int]] = []
    expect_first: list[tuple[int, int]] = []
    skipped: set[int] = set()
    for _ in range(data.draw(st.integers(0, 80))):
        action = data.draw(st.sampled_from(["admit", "admit", "close", "save", "kill"]))
        if action == "admit":
            item = cursor.admit()
            if expect_first:
                assert item == expect_first.pop(0)
            if item is not None:
                assert item[0] not in ends
                assert item not in flight
                flight.append(item)
        elif action == "close" and flight:
            item = flight.pop(data.draw(st.integers(0, len(flight) - 1)))
            how = data.draw(st.sampled_from(["consumed", "filtered", *(["skipped"] if skips_allowed else [])]))
            cursor.close(item[0], how)
            ends[item[0]] = how
            skipped |= {item[1]} if how == "skipped" else set()
        elif action == "save":
            saved, saved_ends, saved_flight = json.loads(json.dumps(cursor.state())), dict(ends), list(flight)
            saved_flight += expect_first
        elif action == "kill":
            cursor = Cursor(num_examples, seed, True, epochs)
            cursor.restore(saved)
            ends, flight = dict(saved_ends), []
            expect_first = sorted(saved_flight)
            skipped = {cursor.example(group) for group, how in ends.items() if how == "skipped"}
    for item in flight:
        cursor.close(item[0], "consumed")
        ends[item[0]] = "consumed"
    for group, _ in drain(cursor):
        assert group not in ends
        ends[group] = "consumed"
    passed_over = {g for g, example in uninterrupted(num_examples, seed, epochs) if example in skipped}
    everything = {group for group, _ in uninterrupted(num_examples, seed, epochs)}
    assert set(ends) | passed_over == everything
    assert cursor.remaining() == 0
    assert cursor.state()["low"] == num_examples * epochs or len(skipped) == num_examples
    assert all(epoch_and_position(group)[0] < epochs for group in ends)
