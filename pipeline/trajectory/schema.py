"""What lies in a shard: datasets, dtypes and attributes, and how groups become these arrays and back.

Legend: M tokens of all sequences laid end to end, N sequences. Token arrays are aligned: index t speaks of token t.
All numeric datasets are contiguous and unfiltered: a row is one short read whatever the lengths, there is no chunk
cache to miss, and the checksums come from the seal around the file (`sealed_file.py`). Soundness is checked column by
column, for all rows at once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from pekoe.pipeline.messages import PublishedGroup, Row
from pekoe.pipeline.records import Finish, Group, Int64, Trajectory

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

HIGHEST_LOGPROB = 1e-4
FINISHES = {int(finish): finish for finish in Finish}
CHECKED_TOKENS = 1 << 16
"""Tokens whose columns are laid end to end to be checked: they stay in the processor's cache."""
Column = npt.NDArray[Any]
Columns = dict[str, Column]
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


def rows_of(groups: Sequence[Group]) -> list[tuple[Group, Trajectory]]:
    """The rows of a shard in their order."""
    return [(group, trajectory) for group in groups for trajectory in group.trajectories]


def slices_of(offsets: Int64, limit: int) -> Iterator[tuple[int, int]]:
    """All rows in ranges (first, end) of at most `limit` tokens, or of one row that has more."""
    first, num_rows = 0, len(offsets) - 1
    while first < num_rows:
        end = max(first + 1, int(np.searchsorted(offsets, offsets[first] + limit, "right")) - 1)
        yield first, end
        first = end


def token_column(name: str, trajectories: Sequence[Trajectory], offsets: Int64, limit: int) -> Iterator[Column]:
    """A column of /tokens piece by piece; each piece is valid until the next is asked for.

    Pieces of about a megabyte stay in the processor's cache until they are hashed and handed to the kernel.
    """
    lay_end_to_end = Joiner([name], limit)
    for first, end in slices_of(offsets, limit):
        yield lay_end_to_end(trajectories[first:end], int(offsets[end] - offsets[first]))[name]


class Joiner:
    """Lays columns of some trajectories end to end, again and again in the same memory."""

    def __init__(self, names: Sequence[str], limit: int) -> None:
        self._limit = limit
        self._rooms: list[tuple[str, str, Column]] = [
            (name, TOKEN_COLUMNS[name][0], np.empty(limit, TOKEN_COLUMNS[name][1])) for name in names
        ]

    def __call__(self, trajectories: Sequence[Trajectory], size: int) -> Columns:
        """`size` tokens in all; beyond the limit they get memory of their own."""
        columns: Columns = {}
        for name, field, room in self._rooms:
            out = room[:size] if size <= self._limit else np.empty(size, room.dtype)
            columns[name] = np.concatenate([getattr(t, field) for t in trajectories], out=out, casting="unsafe")
        return columns


def check_lengths(trajectories: Sequence[Trajectory]) -> None:
    """Raises ValueError for the first trajectory whose arrays differ in length, or that has nothing but a prompt."""
    lengths = [len(trajectory.tokens) for trajectory in trajectories]
    for field, _ in TOKEN_COLUMNS.values():
        if [len(getattr(trajectory, field)) for trajectory in trajectories] != lengths or min(lengths) < 2:
            _raise_first(trajectories)


def checked_rows(trajectories: Sequence[Trajectory], numbers: Columns) -> list[Row]:
    """What the head is told of the rows; raises ValueError for the first trajectory that is not sound.

    `numbers` are the numeric columns of /sequences; lengths were checked before.
    """
    rows: list[Row] = []
    lay_end_to_end = Joiner(["loss_mask", "logprob", "version"], CHECKED_TOKENS)
    for first, end in slices_of(numbers["offset"], CHECKED_TOKENS):
        part = trajectories[first:end]
        offsets, inside = _range_of(numbers, first, end)
        tokens = lay_end_to_end(part, int(offsets[-1]))
        if not rows_are_sound(tokens, offsets, inside):
            _raise_first(part)
        rows += notice_rows(tokens, offsets, inside, first)
    return rows


def _range_of(numbers: Columns, first: int, end: int) -> tuple[Int64, Columns]:
    """Offsets counted from the first token of row `first`, and the numbers, of rows first..end-1."""
    offsets = numbers["offset"][first : end + 1]
    return offsets - offsets[0], {name: numbers[name][first:end] for name in SEQUENCE_COLUMNS}


def _raise_first(trajectories: Sequence[Trajectory]) -> NoReturn:
    for trajectory in trajectories:
        trajectory.check()
    raise ValueError("a trajectory is not sound once its values have the types of the file")


def sequence_arrays(groups: Sequence[Group]) -> Columns:
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
    columns: Columns = {n: np.array(values[n], dtype) for n, dtype in SEQUENCE_COLUMNS.items()}
    columns["offset"] = np.cumsum([0, *(len(t.tokens) for _, t in rows)], dtype=np.int64)
    return columns


def sequence_texts(groups: Sequence[Group]) -> dict[str, list[bytes]]:
    """Text columns of /sequences as UTF-8, N entries each; `info` is JSON.

    They are for people: what cannot be written as it is (half a surrogate pair, a NUL, values that JSON refuses) is
    escaped, for a group must not be lost for its notes.
    """
    return {
        "example": [name for group in groups for name in [_name(group.example)] * len(group.trajectories)],
        "info": [_utf8(_json_text(t.info)) for group in groups for t in group.trajectories],
    }


def _name(text: str) -> bytes:
    return _utf8(text).replace(b"\0", b"\\0")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _json_text(info: dict[str, Any]) -> str:
    if not info:
        return "{}"
    try:
        return _encode_json(info)
    except (TypeError, ValueError, RecursionError):
        return _encode_json({"unwritable": repr(info)})


def _decode_json(info: bytes) -> Any:
    """Python's dialect knows NaN, infinity and half surrogate pairs too, at ten times the price."""
    try:
        return _decode_plain_json(info)
    except msgspec.DecodeError:
        return json.loads(info)


def rows_are_sound(tokens: Columns, offsets: Int64, numbers: Columns) -> bool:
    """What `Trajectory.check` looks at, for many rows at once.

    `tokens` are the columns of these rows only (loss_mask, logprob and version are looked at); `offsets` [rows + 1]
    count from their first token.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    prompts = numbers["prompt_length"]
    if not ((prompts > 0) & (prompts < lengths)).all() or not np.isfinite(numbers["reward"]).all():
        return False
    active = tokens["loss_mask"] != 0
    versions, logprobs = tokens["version"], tokens["logprob"]
    return (
        not active[starts].any()
        and bool(np.maximum.reduceat(tokens["loss_mask"], starts).all())
        and bool(logprobs.max() <= HIGHEST_LOGPROB and logprobs.min() > -np.inf)
        and int(versions.min()) >= -1
        and np.array_equal(versions >= 0, active)
    )


def trajectories_of(tokens: Columns, offsets: Int64, numbers: Columns, infos: Sequence[bytes]) -> list[Trajectory]:
    """Rows back from their columns; raises ValueError for one that is not sound. Rewards are float32.

    Arguments as for `rows_are_sound`, with all columns. The arrays of the rows are parts of the columns, not copies.
    """
    ids, masks, logprobs, versions, turns = (tokens[name] for name in TOKEN_COLUMNS)
    lists = [numbers[name].tolist() for name in ("prompt_length", "reward", "finish", "seed", "sample")]
    rows = []
    for (start, end), info, prompt_length, reward, finish, seed, sample in zip(
        itertools.pairwise(offsets.tolist()), infos, *lists, strict=True
    ):
        part = slice(start, end)
        arrays = ids[part], masks[part], logprobs[part], versions[part], turns[part]
        rows.append(Trajectory(*arrays, prompt_length, reward, FINISHES[finish], seed, sample, _decode_json(info)))
    if not rows_are_sound(tokens, offsets, numbers):
        _raise_first(rows)
    return rows


def notice_rows(tokens: Columns, offsets: Int64, numbers: Columns, first: int) -> list[Row]:
    """What the head is told of rows first, first + 1, …, which are sound; rewards as they are stored."""
    starts, bounds = offsets[:-1], list(itertools.pairwise(offsets.tolist()))
    active, versions = tokens["loss_mask"] != 0, tokens["version"]
    columns = (
        range(first, first + len(starts)),
        numbers["sample"].tolist(),
        np.diff(offsets).tolist(),
        [int(np.count_nonzero(active[start:end])) for start, end in bounds],
        numbers["reward"].tolist(),
        # -1, the version of a token that was given, is the highest number without a sign.
        np.minimum.reduceat(versions.view(np.uint32), starts).tolist(),
        np.maximum.reduceat(versions, starts).tolist(),
        (numbers["truncated"] != 0).tolist(),
    )
    return [Row(*values) for values in zip(*columns, strict=True)]


def gather_rows(rows: Sequence[Row], numbers: Columns) -> tuple[PublishedGroup, ...]:
    """Neighbouring rows of the same group and try, put together."""
    keys = list(zip(numbers["group"].tolist(), numbers["try"].tolist(), strict=True))
    return tuple(
        PublishedGroup(group=group, try_number=try_number, rows=tuple(row for row, _ in members))
        for (group, try_number), members in itertools.groupby(zip(rows, keys, strict=True), key=lambda pair: pair[1])
    )


def notice_groups(groups: Sequence[Group]) -> tuple[PublishedGroup, ...]:
    """What the head is told of a shard that holds these groups in this order."""
    trajectories, numbers = [trajectory for _, trajectory in rows_of(groups)], sequence_arrays(groups)
    check_lengths(trajectories)
    return gather_rows(checked_rows(trajectories, numbers), numbers)
