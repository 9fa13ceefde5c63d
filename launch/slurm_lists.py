"""Slurm's compact lists, expanded in pure Python: no scontrol needed."""

from __future__ import annotations

import re

COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
PIECE = re.compile(r"\[([^\]]*)\]")


def expand_task_counts(text: str) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]: tasks on each node of the step. ValueError quotes what is not such a list."""
    counts: list[int] = []
    for part in text.split(","):
        match = COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"tasks per node: {text!r} is not a list like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """`a[1-2,07]-ib,single` -> every host name, zero padding kept. ValueError quotes what is not a host list."""
    hosts: list[str] = []
    for part in _split_outside_brackets(text):
        if part.count("[") != part.count("]") or not part:
            raise ValueError(f"host list: {text!r} is not a list like node[01-03,07],other")
        names = [""]
        position = 0
        for match in PIECE.finditer(part):
            literal = part[position : match.start()]
            names = [name + literal + index for name in names for index in _expand_range(match[1], text)]
            position = match.end()
        hosts += [name + part[position:] for name in names]
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _expand_range(ranges: str, text: str) -> list[str]:
    indices: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"host list: {text!r}: {part!r} is not an index or a range of indices")
        numbers = range(int(first), int(last or first) + 1)
        indices += [str(number).zfill(len(first)) for number in numbers]
    return indices
