"""What the self-test tries of the packing room: odd items, few, none, equal ones; whole numbers are equal or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pekoe.kernels.self_test import Case, CaseMaker

Int64 = npt.NDArray[np.int64]


def best_fit(seed: int) -> list[Case]:
    numbers = np.random.default_rng(seed)
    return [
        Case({"lengths": lengths, "capacity": 128, "max_items": max_items})
        for lengths in (numbers.integers(0, 129, 237), np.full(65, 43), np.zeros(0, np.int64))
        for max_items in (3, 1 << 40)
    ]


def parts(seed: int) -> list[Case]:
    """Of `karmarkar_karp` and `equal_count`: costs, some of them zero or equal."""
    numbers = np.random.default_rng(seed)
    uneven = numbers.exponential(10.0, 131)
    whole = np.sort(numbers.integers(0, 9, 97)).astype(np.float64)
    return [
        Case({"costs": costs, "num_parts": num_parts})
        for costs in (uneven, whole, np.ones(1), np.zeros(5), np.zeros(0))
        for num_parts in (1, 7, 64)
    ]


def joint_plan(seed: int) -> list[Case]:
    numbers = np.random.default_rng(seed)
    cases = []
    for num_items, counted, every_step in ((117, False, True), (117, False, False), (33, True, True), (0, False, True)):
        lengths = numbers.integers(1, 900, num_items)
        counts = numbers.integers(1, 5, num_items) if counted else None
        cases.append(
            Case({
                "lengths": lengths, "costs": lengths * (1.0 + lengths / 512), "counts": counts, "num_ranks": 5,
                "max_tokens": 1024, "max_sequences": 6, "every_step": every_step,
            })
        )  # fmt: skip
    return cases


def boundaries(numbers: np.random.Generator, num_sequences: int, longest: int) -> Int64:
    """Of sequences between nothing and `longest` tokens."""
    return np.concatenate([[0], numbers.integers(0, longest + 1, num_sequences).cumsum()]).astype(np.int64)


def arrays(array: npt.NDArray[Any], others: Sequence[Int64 | None]) -> list[tuple[Any, ...]]:
    """As numpy arrays and as tensors."""
    import torch

    every = (array, *others)
    return [every, tuple(None if one is None else torch.from_numpy(one.copy()) for one in every)]


def pack(seed: int) -> list[Case]:
    numbers = np.random.default_rng(seed)
    cases = []
    for dtype, rest in (("float32", ()), ("int64", (3,)), ("uint8", (5,)), ("float64", (0,))):
        bounds = boundaries(numbers, 7, 19)
        padded = numbers.integers(0, 99, (7, 23, *rest)).astype(dtype)
        for starts in (None, numbers.integers(0, 4, 7)):
            cases += [
                Case({"padded": array, "cu_seqlens": ends, "starts": begins, "num_tokens": int(bounds[-1])})
                for array, ends, begins in arrays(padded, (bounds, starts))
            ]
    return cases


def unpack(seed: int) -> list[Case]:
    numbers = np.random.default_rng(seed)
    cases = []
    for dtype, rest, fill in (("float32", (), -1.5), ("int32", (3,), 7), ("int16", (1, 5), 0)):
        bounds = boundaries(numbers, 9, 17)
        packed = numbers.integers(0, 99, (int(bounds[-1]), *rest)).astype(dtype)
        for starts in (None, numbers.integers(0, 5, 9)):
            cases += [
                Case({"packed": array, "cu_seqlens": ends, "starts": begins, "max_length": 21, "fill": fill})
                for array, ends, begins in arrays(packed, (bounds, starts))
            ]
    return cases


def per_token(seed: int) -> list[Case]:
    """Of `position_ids` and `sequence_index`."""
    numbers = np.random.default_rng(seed)
    return [
        Case({"cu_seqlens": array, "num_tokens": int(bounds[-1])})
        for bounds in (boundaries(numbers, 13, 40), np.zeros(1, np.int64), np.zeros(4, np.int64))
        for (array,) in arrays(bounds, ())
    ]


def zigzag_split(seed: int) -> list[Case]:
    numbers = np.random.default_rng(seed)
    cases = []
    for num_ranks in (1, 3, 8):
        bounds = boundaries(numbers, 6, 70)
        rooms = -(-np.diff(bounds) // (2 * num_ranks)) * 2 * num_ranks
        padded = np.concatenate([[0], rooms.cumsum()]).astype(np.int64)
        cases.append(Case({"cu_seqlens": bounds, "padded": padded, "num_ranks": num_ranks}))
    return cases


def prefix_trie(seed: int) -> list[Case]:
    numbers = np.random.default_rng(seed)
    some = boundaries(numbers, 11, 13)
    return [
        Case({"tokens": numbers.integers(0, 3, bounds[-1]).astype(dtype), "cu_seqlens": bounds})
        for bounds in (some, np.array([0, 5, 5, 10]), np.zeros(1, np.int64))
        for dtype in (np.int32, np.int64)
    ]


def block_map(seed: int) -> list[Case]:
    """Subtree ends of chains with branches."""
    numbers = np.random.default_rng(seed)
    ends: list[int] = []
    for _ in range(9):
        stem, leaf = (int(length) for length in numbers.integers(1, 20, 2))
        stop = len(ends) + stem + 2 * leaf
        ends += [stop] * stem + [stop - leaf] * leaf + [stop] * leaf
    whole = np.array(ends, dtype=np.int32)
    return [Case({"subtree_end": end, "block": block}) for end in (whole, whole[:0]) for block in (1, 16, 128)]


CASES: dict[str, CaseMaker] = {
    "packing.best_fit": best_fit,
    "packing.karmarkar_karp": parts,
    "packing.equal_count": parts,
    "packing.joint_plan": joint_plan,
    "packing.pack": pack,
    "packing.unpack": unpack,
    "packing.position_ids": per_token,
    "packing.sequence_index": per_token,
    "packing.zigzag_split": zigzag_split,
    "packing.prefix_trie": prefix_trie,
    "packing.block_map": block_map,
}
