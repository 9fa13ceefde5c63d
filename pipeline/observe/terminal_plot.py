"""A curve in plain characters: braille dots, two by four to a character, with axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

EMPTY = 0x2800
DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Unicode's bit of the dot in row 0..3 and column 0..1 of a braille character."""


def terminal_plot(x: Sequence[float], y: Sequence[float], title: str, *, width: int = 80, height: int = 14) -> str:
    """A line through the points (x rising, all finite), `width` by `height` characters without the axes."""
    if not x or len(x) != len(y):
        raise ValueError(f"terminal plot: {len(x)} x values and {len(y)} y values")
    low, high = min(y), max(y)
    if low == high:
        low, high = low - 0.5, high + 0.5
    columns = [_scale(value, x[0], x[-1], 2 * width - 1) for value in x]
    rows = [4 * height - 1 - _scale(value, low, high, 4 * height - 1) for value in y]
    cells = [[0] * width for _ in range(height)]
    for column, row in _line(columns, rows):
        cells[row // 4][column // 2] |= DOT_BITS[row % 4][column % 2]
    middle = low + (high - low) * (1 - height // 2 / (height - 1))
    labels = {0: f"{high:.4g}", height // 2: f"{middle:.4g}", height - 1: f"{low:.4g}"}
    margin = max(len(label) for label in labels.values())
    lines = [" " * (margin + 2) + title]
    for index, line in enumerate(cells):
        drawn = "".join(chr(EMPTY + bits) if bits else " " for bits in line)
        lines.append(f"{labels.get(index, ''):>{margin}} {'┤' if index in labels else '│'}{drawn}".rstrip())
    first, last = f"{x[0]:g}", f"{x[-1]:g}"
    lines.append(" " * (margin + 1) + "└" + "─" * width)
    lines.append(" " * (margin + 2) + first + last.rjust(width - len(first)))
    return "\n".join(lines)


def _scale(value: float, low: float, high: float, steps: int) -> int:
    return round((value - low) / (high - low) * steps) if high > low else 0


def _line(columns: Sequence[int], rows: Sequence[int]) -> set[tuple[int, int]]:
    """The dots of the segments between neighbouring points."""
    dots = set(zip(columns, rows, strict=True))
    for (column, row), (next_column, next_row) in itertools.pairwise(zip(columns, rows, strict=True)):
        wide, tall = next_column - column, next_row - row
        length = max(abs(wide), abs(tall), 1)
        dots |= {(column + round(wide * k / length), row + round(tall * k / length)) for k in range(length)}
    return dots
