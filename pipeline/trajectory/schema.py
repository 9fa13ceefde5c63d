"""What lies in a shard: datasets, dtypes and attributes, and how groups become these arrays and back.

Legend: M tokens of all sequences laid end to end, N sequences. Token arrays are aligned: index t speaks of token t.
All numeric datasets are contiguous and unfiltered: a row is one short read whatever the lengths, there is no chunk
cache to miss, and the checksums come from the seal around the file (`sealed_file.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pekoe.pipeline.messages import PublishedGroup, Row
from pekoe.pipeline.records import Finish, Group, Trajectory

SCHEMA_VERSION = 1
LOGPROB_CONVENTION = "token-aligned, at the sampling temperature, full vocabulary"

TOKEN_COLUMNS: dict[str, tuple[str, type[np.generic]]] = {
    "id": ("tokens", np.int32),
    "loss_mask": ("loss_mask", np.uint8),
    "logprob": ("logprobs", np.float32),
    "version": ("versions", np.int32),
    "turn": ("turns", np.int32),
}
"""Dataset under /tokens -> (field of Trajectory, dtype); each has M entries."""

SEQUENCE_COLUMNS: dict[str, type[np.generic]] = {
    "group": np.int64,
    "try": np.int32,
    "sample": np.int32,
    "seed": np.int64,
    "prompt_length": np.int32,
    "reward": np.float32,
    "truncated": np.uint8,
    "finish": np.int8,
}
"""Numeric datasets under /sequences, N entries each; beside them `offset` i64[N+1] and the texts `example`, `info`."""

TEXT_COLUMNS = ("example", "info")


@dataclass(frozen=True)
class ShardAttributes:
    """Facts that hold for all rows of a shard, kept as attributes of the file."""

    run: str
    attempt: int
    writer: str
    """Name of the writer (`rank-3`): with the attempt it names the folder."""
    temperature: float
    """Sampling temperature of the behaviour log-probs."""
    logprob_convention: str = LOGPROB_CONVENTION


def rows_of(groups: Sequence[Group]) -> list[tuple[Group, Trajectory]]:
    """The rows of a shard in their order."""
    return [(group, trajectory) for group in groups for trajectory in group.trajectories]


def token_arrays(groups: Sequence[Group]) -> dict[str, npt.NDArray[Any]]:
    """Columns of /tokens, each [M]; raises ValueError for a trajectory that is not sound."""
    trajectories = [trajectory for _, trajectory in rows_of(groups)]
    for trajectory in trajectories:
        trajectory.check()
    return {
        name: np.concatenate([getattr(t, field) for t in trajectories]).astype(dtype, copy=False)
        for name, (field, dtype) in TOKEN_COLUMNS.items()
    }


def sequence_arrays(groups: Sequence[Group]) -> dict[str, npt.NDArray[Any]]:
    """Numeric columns of /sequences, [N] each, and `offset` [N+1]."""
    rows = rows_of(groups)
    values: dict[str, list[Any]] = {
        "group": [group.number for group, _ in rows],
        "try": [group.try_number for group, _ in rows],
        "sample": [t.sample for _, t in rows],
        "seed": [t.seed for _, t in rows],
        "prompt_length": [t.prompt_length for _, t in rows],
        "reward": [t.reward for _, t in rows],
        "truncated": [t.truncated for _, t in rows],
        "finish": [int(t.finish) for _, t in rows],
    }
    columns: dict[str, npt.NDArray[Any]] = {n: np.array(values[n], dtype) for n, dtype in SEQUENCE_COLUMNS.items()}
    columns["offset"] = np.cumsum([0, *(len(t.tokens) for _, t in rows)], dtype=np.int64)
    return columns


def sequence_texts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Text columns of /sequences, N entries each; `info` is JSON."""
    rows = rows_of(groups)
    return {
        "example": [group.example for group, _ in rows],
        "info": [json.dumps(trajectory.info, default=str, ensure_ascii=False) for _, trajectory in rows],
    }


def trajectory_of(tokens: dict[str, npt.NDArray[Any]], sequence: dict[str, Any], info: str) -> Trajectory:
    """One row back from its token slices and its numbers; the reverse of the functions above (rewards as float32)."""
    return Trajectory(
        **{field: tokens[name] for name, (field, _) in TOKEN_COLUMNS.items()},
        prompt_length=int(sequence["prompt_length"]),
        reward=float(sequence["reward"]),
        finish=Finish(int(sequence["finish"])),
        seed=int(sequence["seed"]),
        sample=int(sequence["sample"]),
        info=json.loads(info),
    )


def notice_row(row: int, trajectory: Trajectory) -> Row:
    """What the head is told of one row; the reward is rounded to float32 as it is stored."""
    versions = trajectory.versions[trajectory.loss_mask.astype(bool)]
    return Row(
        row=row,
        sample=trajectory.sample,
        length=len(trajectory.tokens),
        num_active=len(versions),
        reward=float(np.float32(trajectory.reward)),
        min_version=int(versions.min()),
        max_version=int(versions.max()),
        truncated=trajectory.truncated,
    )


def notice_groups(groups: Sequence[Group]) -> tuple[PublishedGroup, ...]:
    """What the head is told of a shard that holds these groups in this order."""
    notices = []
    row = 0
    for group in groups:
        rows = tuple(notice_row(row + index, trajectory) for index, trajectory in enumerate(group.trajectories))
        notices.append(PublishedGroup(group=group.number, try_number=group.try_number, rows=rows))
        row += len(rows)
    return tuple(notices)
