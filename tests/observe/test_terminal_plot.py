"""The plot in characters: the dots lie where the numbers say."""

from __future__ import annotations

import itertools

import pytest

from pekoe.pipeline.observe.terminal_plot import terminal_plot


def test_a_rising_line_goes_from_bottom_left_to_top_right() -> None:
    lines = terminal_plot([0, 10], [1.0, 3.0], "reward", width=20, height=5).splitlines()
    assert lines[0].strip() == "reward"
    body = lines[1:6]
    assert [line.split("┤")[0].strip() for line in (body[0], body[2], body[4])] == ["3", "2", "1"]
    drawn = [line[3:].ljust(20) for line in body]
    dotted = [{index for index, char in enumerate(row) if char != " "} for row in drawn]
    assert 19 in dotted[0]
    assert 0 in dotted[4]
    assert all(min(upper) >= max(lower) - 1 for upper, lower in itertools.pairwise(dotted))
    assert set().union(*dotted) == set(range(20)), "the line has no holes"
    assert lines[-1].split() == ["0", "10"]


@pytest.mark.parametrize(
    ("x", "y"), [([5], [0.25]), ([1, 2, 3], [0.5, 0.5, 0.5]), ([1, 1], [0.0, 1.0]), ([1, 2], [-1e9, 1e9])]
)
def test_degenerate_curves_are_drawn(x: list[float], y: list[float]) -> None:
    text = terminal_plot(x, y, "t", width=30, height=6)
    assert any(0x2800 < ord(char) <= 0x28FF for char in text)
    assert len(text.splitlines()) == 9


def test_nothing_and_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="0 x values"):
        terminal_plot([], [], "t")
    with pytest.raises(ValueError, match="1 x values and 2 y values"):
        terminal_plot([1], [1, 2], "t")
