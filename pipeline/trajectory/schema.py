"""What lies in a shard: datasets, dtypes and attributes, and how groups become these arrays and back.

Legend: M tokens of all sequences laid end to end, N sequences. Token arrays are aligned: index t speaks of token t.
All numeric datasets are contiguous and unfiltered: a row is one short read whatever the lengths, there is no chunk
cache to miss, and the checksums come from the seal around the file (`sealed_file.py`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pekoe.pipeline.messages import PublishedGroup, Row
from pekoe.pipeline.records import TEACHER_LOGPROBS, TURN_REWARDS, Finish, Group, Int64, Trajectory, has_extra

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

OPTIONAL_COLUMNS: dict[str, tuple[str, type[np.generic]]] = {
    "turn_reward": (TURN_REWARDS, np.float32),
    "teacher_logprob": (TEACHER_LOGPROBS, np.float32),
}
"""Of the same kind: dataset -> (name in Trajectory.extra, dtype), in a shard only if some row has it."""

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

FINISHES = {int(finish): finish for finish in Finish}
Column = npt.NDArray[Any]
Columns = dict[str, Column]
PLAIN = (str, int, bool, type(None))
_encode_plain_json = msgspec.json.Encoder().encode
_decode_plain_json = msgspec.json.Decoder().decode
_encode_json = json.JSONEncoder(default=str, ensure_ascii=False).encode


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


def trajectories_in(groups: Sequence[Group]) -> list[Trajectory]:
    """The rows of a shard in their order."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def sequence_arrays(groups: Sequence[Group]) -> Columns:
    """Numeric columns of /sequences, [N] each, and `offset` [N+1]."""
    rows = trajectories_in(groups)
    sizes = [len(group.trajectories) for group in groups]
    values: dict[str, Any] = {
        "group": np.repeat(np.array([group.number for group in groups], np.int64), sizes),
        "try": np.repeat(np.array([group.try_number for group in groups], np.int32), sizes),
        "sample": [t.sample for t in rows],
        "seed": [t.seed for t in rows],
        "prompt_length": [t.prompt_length for t in rows],
        "reward": [t.reward for t in rows],
        "finish": [t.finish for t in rows],
    }
    values["truncated"] = [finish == Finish.LENGTH for finish in values["finish"]]
    columns: Columns = {name: np.array(values[name], dtype) for name, dtype in SEQUENCE_COLUMNS.items()}
    columns["offset"] = np.cumsum([0, *(len(t.tokens) for t in rows)], dtype=np.int64)
    return columns


def sequence_texts(groups: Sequence[Group]) -> dict[str, list[bytes]]:
    """Text columns of /sequences as UTF-8, N entries each; `info` is JSON.

    They are for people: what cannot be written as it is (half a surrogate pair, a NUL, values that JSON refuses) is
    escaped, for a group must not be lost for its notes.
    """
    return {
        "example": [name for group in groups for name in [_name(group.example)] * len(group.trajectories)],
        "info": [info_json(trajectory.info) for group in groups for trajectory in group.trajectories],
    }


def _name(text: str) -> bytes:
    return _utf8(text).replace(b"\0", b"\\0")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def info_json(info: dict[str, Any]) -> bytes:
    """Free notes of a trajectory as JSON: Python's dialect, which knows NaN and infinity; plain content goes the fast
    way."""
    for value in info.values():
        if type(value) not in PLAIN and not (type(value) is float and isfinite(value)):
            break
    else:
        with suppress(TypeError, ValueError):
            return _encode_plain_json(info)
    try:
        return _utf8(_encode_json(info))
    except (TypeError, ValueError, RecursionError):
        return _utf8(_encode_json({"unwritable": repr(info)}))


def read_info(info: bytes) -> Any:
    """Inverse of `info_json`: Python's dialect knows NaN, infinity and half surrogate pairs too, at ten times the
    price."""
    try:
        return _decode_plain_json(info)
    except msgspec.DecodeError:
        return json.loads(info)


def trajectories_of(tokens: Columns, offsets: Int64, numbers: Columns, infos: Sequence[bytes]) -> list[Trajectory]:
    """Rows back from their columns, not checked; rewards are float32.

    `tokens` are the columns of these rows only, `offsets` [rows + 1] count from their first token. The arrays of the
    rows are parts of the columns, not copies. Raises ValueError or KeyError for texts and numbers that mean nothing.
    """
    ids, masks, logprobs, versions, turns = (tokens[name] for name in TOKEN_COLUMNS)
    lists = [numbers[name].tolist() for name in ("prompt_length", "reward", "finish", "seed", "sample")]
    rows = []
    for (start, end), info, prompt_length, reward, finish, seed, sample in zip(
        itertools.pairwise(offsets.tolist()), infos, *lists, strict=True
    ):
        part = slice(start, end)
        arrays = ids[part], masks[part], logprobs[part], versions[part], turns[part]
        rows.append(Trajectory(*arrays, prompt_length, reward, FINISHES[finish], seed, sample, read_info(info)))
    for name, (field, _) in OPTIONAL_COLUMNS.items():
        if name in tokens:
            for row, (start, end) in zip(rows, itertools.pairwise(offsets.tolist()), strict=True):
                row.extra[field] = tokens[name][start:end]
    return rows


def optional_columns(trajectories: Sequence[Trajectory]) -> tuple[str, ...]:
    """Those that a shard of these rows has. ValueError when only some of them have log-probs of a teacher."""
    return tuple(name for name, (field, _) in OPTIONAL_COLUMNS.items() if has_extra(field, trajectories))


def column_dtype(name: str) -> np.dtype[Any]:
    """Of a token column, in the machine's byte order."""
    return np.dtype((TOKEN_COLUMNS.get(name) or OPTIONAL_COLUMNS[name])[1])


def gather_rows(rows: Sequence[Row], numbers: Columns) -> tuple[PublishedGroup, ...]:
    """Neighbouring rows of the same group and try, put together."""
    groups, tries = numbers["group"], numbers["try"]
    changes = np.flatnonzero((np.diff(groups) != 0) | (np.diff(tries) != 0)) + 1
    bounds = [0, *changes.tolist(), len(groups)]
    return tuple(
        PublishedGroup(int(groups[start]), int(tries[start]), tuple(rows[start:end]))
        for start, end in itertools.pairwise(bounds)
    )
