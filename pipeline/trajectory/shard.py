"""One HDF5 file that holds whole groups: written once, immutable from then on, every byte verified when it is read.

HDF5 lays the file out in memory; the columns go from the trajectories to the disk by the operations of `files`
(temporary name, fsync, rename), so HDF5 never sees a full disk, a lock or a half-written file. Readers never open a
file that is still being written; they take names, texts and addresses from HDF5, and the columns from where they lie.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pekoe.pipeline.messages import PublishedGroup
from pekoe.pipeline.records import Group, Int64, Trajectory
from pekoe.pipeline.trajectory import schema
from pekoe.pipeline.trajectory.hdf5_layout import Layout, h5py, lay_out
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.sealed_file import BrokenSeal, SealedFile, Sealer, publish_sealed
from pekoe.pipeline.trajectory.token_columns import RowFacts, TokenColumns, raise_first, rows_are_sound, slices_of

SUFFIX = ".h5"
SLICE_TOKENS = 1 << 20
"""Tokens that are looked at together when a whole file is checked: bounds the memory of it."""
NOT_THERE_YET = (errno.ENOENT, errno.ESTALE)


class BadShard(Exception):
    """A shard that cannot be used; nothing of it was handed out by the call that raised."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class SourceRows(NamedTuple):
    """Rows of an archive that came from one shard."""

    shard: str
    """Its path, relative to the run directory."""
    digest: str
    """Of its seal: tells it from a later shard of the same name."""
    first_row: int
    end_row: int


@dataclass(frozen=True)
class Written:
    """A shard that lies on the disk."""

    num_bytes: int
    groups: tuple[PublishedGroup, ...]
    """What the head is told of it."""


def write_shard(path: Path, groups: Sequence[Group], attributes: ShardAttributes) -> Written:
    """Publishes groups as one file, durably.

    Raises ValueError for an unsound trajectory or when there is none, OSError when the disk refuses (then no file of
    this name exists and the temporary one is removed).
    """
    if not any(group.trajectories for group in groups):
        raise ValueError(f"shard {path}: no trajectory to write")
    body = ShardBody(groups, attributes)
    size = publish_sealed(path, body.pieces())
    return Written(size, body.notice())


def encode_shard(groups: Sequence[Group], attributes: ShardAttributes) -> bytes:
    """The bytes of a sealed shard; equal input gives equal bytes."""
    image = io.BytesIO()
    sealer = Sealer(image.write)
    for piece in ShardBody(groups, attributes).pieces():
        sealer.add(piece)
    sealer.finish()
    return image.getvalue()


class ShardBody:
    """What is sealed: the bytes of groups as HDF5, piece by piece."""

    def __init__(self, groups: Sequence[Group], attributes: ShardAttributes) -> None:
        trajectories = schema.trajectories_in(groups)
        self._numbers = schema.sequence_arrays(groups)
        self._tokens = TokenColumns(trajectories, self._numbers)
        optional = schema.optional_columns(trajectories)
        self._layout = shard_layout(attributes, self._numbers, schema.sequence_texts(groups), optional)

    def pieces(self) -> Iterator[Any]:
        """Raises ValueError when it comes to an unsound trajectory."""
        return self._layout.pieces(lambda path: self._tokens.pieces(path.removeprefix("tokens/")))

    def notice(self) -> tuple[PublishedGroup, ...]:
        """What the head is told, once all pieces were asked for."""
        return schema.gather_rows(self._tokens.rows(), self._numbers)


def shard_layout(
    attributes: ShardAttributes,
    numbers: schema.Columns,
    texts: Mapping[str, list[bytes]],
    optional: Sequence[str] = (),
    sources: Sequence[SourceRows] = (),
) -> Layout:
    """The file of a shard but for its token columns, which it asks for as `tokens/NAME`.

    `optional` names those of `OPTIONAL_COLUMNS` that it has; `sources` are the shards whose rows an archive takes over.
    """
    num_tokens = int(numbers["offset"][-1])
    origin = {
        "sources/first_row": np.array([source.first_row for source in sources], np.int64),
        "sources/end_row": np.array([source.end_row for source in sources], np.int64),
    }
    names = {
        "sources/shard": [source.shard.encode() for source in sources],
        "sources/digest": [source.digest.encode() for source in sources],
    }
    return lay_out(
        {"schema_version": schema.SCHEMA_VERSION, **asdict(attributes)},
        {f"tokens/{name}": (num_tokens, schema.column_dtype(name)) for name in (*schema.TOKEN_COLUMNS, *optional)},
        {f"sequences/{name}": column for name, column in numbers.items()} | (origin if sources else {}),
        {f"sequences/{name}": lines for name, lines in texts.items()} | (names if sources else {}),
    )


def read_columns(
    file: SealedFile, addresses: Mapping[str, int], names: Sequence[str], start: int, end: int
) -> schema.Columns:
    """Entries start..end-1 of token columns that begin at `addresses`, verified, in memory of their own.

    Raises BrokenSeal, or ValueError for entries outside of the file.
    """
    dtypes = [schema.column_dtype(name).newbyteorder("<") for name in names]
    ranges = [
        (addresses[name] + start * dtype.itemsize, (end - start) * dtype.itemsize)
        for name, dtype in zip(names, dtypes, strict=True)
    ]
    found = [data.view(dtype) for data, dtype in zip(file.read_ranges(ranges), dtypes, strict=True)]
    return {n: column if column.flags.aligned else column.copy() for n, column in zip(names, found, strict=True)}


def _sound_rows(
    tokens: schema.Columns, offsets: Int64, numbers: schema.Columns, infos: Sequence[bytes]
) -> list[Trajectory]:
    """Rows back from their columns; raises ValueError when one is not sound."""
    trajectories = schema.trajectories_of(tokens, offsets, numbers, infos)
    if not rows_are_sound(tokens, offsets, numbers):
        raise_first(trajectories)
    return trajectories


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Rising row numbers as half-open ranges of neighbours: 1 2 3 7 -> (1, 4), (7, 8)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


class Shard:
    """A published shard, open for reading.

    Raises BadShard for anything wrong with the file; OSError with ENOENT or ESTALE passes through, because a name may
    be late on a network filesystem. Not thread-safe; after a fork the child opens the file again.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != SUFFIX:
            raise BadShard(path, f"not the name of a published shard (*{SUFFIX})")
        self.path = path
        with self._damage():
            self._file = SealedFile(path)
        try:
            with self._damage():
                self._hdf5 = h5py.File(self._file, "r", locking=False)
                self.attributes = self._read_attributes()
                self._offsets, self._numbers = self._read_numbers()
                optional = [name for name in schema.OPTIONAL_COLUMNS if name in self._hdf5["tokens"]]
                self.addresses = {
                    name: self._address(f"tokens/{name}", schema.column_dtype(name), self.num_tokens)
                    for name in (*schema.TOKEN_COLUMNS, *optional)
                }
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._hdf5.close()
        self._file.close()

    @property
    def num_rows(self) -> int:
        return len(self._offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[-1])

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the disk so far."""
        return self._file.bytes_read

    @property
    def digest(self) -> str:
        """Of the whole content, by its seal."""
        return self._file.digest

    @property
    def identity(self) -> tuple[int, int, int]:
        """Number, size and modification time (ns) of the file behind this handle."""
        return self._file.identity

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Turns whatever HDF5, numpy or the seal say about a damaged file into BadShard."""
        try:
            yield
        except BrokenSeal as error:
            raise BadShard(self.path, str(error)) from error
        except OSError as error:
            if error.errno in NOT_THERE_YET:
                raise
            raise BadShard(self.path, f"unreadable: {error}") from error
        except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise BadShard(self.path, f"not a shard of this schema: {error}") from error

    def _read_attributes(self) -> ShardAttributes:
        version = int(self._hdf5.attrs["schema_version"])
        if version != schema.SCHEMA_VERSION:
            raise ValueError(f"schema version {version}, this code reads {schema.SCHEMA_VERSION}")
        found = self._hdf5.attrs
        if found["logprob_convention"] != schema.LOGPROB_CONVENTION:
            raise ValueError(f"log-probs are {found['logprob_convention']!r}, wanted {schema.LOGPROB_CONVENTION!r}")
        return ShardAttributes(
            run=str(found["run"]),
            attempt=int(found["attempt"]),
            writer=str(found["writer"]),
            temperature=float(found["temperature"]),
            logprob_convention=str(found["logprob_convention"]),
        )

    def _read_numbers(self) -> tuple[Int64, dict[str, npt.NDArray[Any]]]:
        (n,) = self._dataset("sequences/group").shape
        offsets: Int64 = self._read_whole("sequences/offset", np.int64, n + 1)
        numbers = {
            name: self._read_whole(f"sequences/{name}", dtype, n) for name, dtype in schema.SEQUENCE_COLUMNS.items()
        }
        if n < 1 or offsets[0] != 0 or (np.diff(offsets) <= 0).any():
            raise ValueError("offsets do not rise from 0")
        for name in schema.TEXT_COLUMNS:
            if self._dataset(f"sequences/{name}").shape != (n,):
                raise ValueError(f"/sequences/{name} has not one entry for each of {n} sequences")
        return offsets, numbers

    def _dataset(self, path: str) -> Any:
        return h5py.h5d.open(self._hdf5.id, path.encode())

    def _read_whole(self, path: str, dtype: type[np.generic], length: int) -> npt.NDArray[Any]:
        stored = np.dtype(dtype).newbyteorder("<")
        address = self._address(path, dtype, length)
        return self._file.read_range(address, length * stored.itemsize).view(stored)

    def _address(self, path: str, dtype: npt.DTypeLike, length: int) -> int:
        """Where the entries of a contiguous column of this type and length begin in the file."""
        column, wanted = self._dataset(path), np.dtype(dtype).newbyteorder("<")
        if column.shape != (length,) or column.dtype != wanted:
            raise ValueError(f"/{path} is {column.dtype} {column.shape}, wanted {wanted} ({length},)")
        address = column.get_offset()
        if address is None or column.get_storage_size() != length * wanted.itemsize:
            raise ValueError(f"/{path} is not contiguous")
        return int(address)

    def group_numbers(self) -> list[int]:
        """Admission number of each row."""
        return [int(number) for number in self._numbers["group"]]

    def read(self, rows: Sequence[int]) -> list[tuple[int, Trajectory]]:
        """(group number, trajectory) of the rows, in the order asked; reads their bytes only."""
        outside = [row for row in (min(rows, default=0), max(rows, default=0)) if not 0 <= row < self.num_rows]
        if outside:
            raise BadShard(self.path, f"row {outside[0]} of {self.num_rows}")
        wanted = sorted(set(rows))
        with self._damage():
            read = [pair for first, end in _runs(wanted) for pair in self._read_run(first, end)]
        if wanted == list(rows):
            return read
        found = dict(zip(wanted, read, strict=True))
        return [found[row] for row in rows]

    def _read_run(self, first: int, end: int) -> list[tuple[int, Trajectory]]:
        """Rows first..end-1, which lie side by side."""
        infos = self._hdf5["sequences"]["info"][first:end].tolist()
        trajectories = _sound_rows(*self._columns(first, end), infos)
        return list(zip(self._numbers["group"][first:end].tolist(), trajectories, strict=True))

    def _columns(self, first: int, end: int) -> tuple[schema.Columns, Int64, schema.Columns]:
        """Token columns, offsets and numbers of rows first..end-1: one read for each token column."""
        offsets = self._offsets[first : end + 1]
        names = tuple(self.addresses)
        tokens = read_columns(self._file, self.addresses, names, int(offsets[0]), int(offsets[-1]))
        return tokens, offsets - offsets[0], {name: column[first:end] for name, column in self._numbers.items()}

    def column(self, name: str, start: int, end: int) -> npt.NDArray[Any]:
        """Entries start..end-1 of a token column, verified; raises BadShard."""
        with self._damage():
            return read_columns(self._file, self.addresses, [name], start, end)[name]

    def groups(self) -> list[Group]:
        """All groups in their order."""
        with self._damage():
            names = self._hdf5["sequences"]["example"].asstr()[:]
        groups: list[Group] = []
        for row, (number, trajectory) in enumerate(self.read(range(self.num_rows))):
            try_number = int(self._numbers["try"][row])
            if not groups or (groups[-1].number, groups[-1].try_number) != (number, try_number):
                groups.append(Group(number, try_number, str(names[row]), []))
            groups[-1].trajectories.append(trajectory)
        return groups

    def texts(self) -> dict[str, list[bytes]]:
        """The text columns, as they lie in the file."""
        with self._damage():
            return {name: self._hdf5["sequences"][name][:].tolist() for name in schema.TEXT_COLUMNS}

    def numbers(self) -> schema.Columns:
        """The numeric columns of /sequences, with `offset`."""
        return {**self._numbers, "offset": self._offsets}

    def sources(self) -> list[SourceRows]:
        """Of an archive: the shards whose rows it holds; of other shards: nothing."""
        with self._damage():
            if "sources" not in self._hdf5:
                return []
            found = {name: self._hdf5["sources"][name][:].tolist() for name in ("shard", "digest")}
            first, end = (self._hdf5["sources"][name][:].tolist() for name in ("first_row", "end_row"))
            return [
                SourceRows(shard.decode(), digest.decode(), *rows)
                for shard, digest, *rows in zip(found["shard"], found["digest"], first, end, strict=True)
            ]

    def notice(self) -> tuple[PublishedGroup, ...]:
        """The groups as the notice of this shard named them; every row is read and checked."""
        facts, infos = RowFacts(), self.texts()["info"]
        with self._damage():
            for first, end in slices_of(self._offsets, SLICE_TOKENS):
                tokens, offsets, numbers = self._columns(first, end)
                _sound_rows(tokens, offsets, numbers, infos[first:end])
                facts.add_tokens(tokens["id"], offsets, self._numbers)
                facts.add_mask(tokens["loss_mask"] != 0, offsets[:-1])
                facts.add_versions(tokens["version"], offsets[:-1])
                if "turn_reward" in tokens:
                    facts.add_turn_rewards(tokens["turn_reward"], offsets[:-1])
        return schema.gather_rows(facts.rows(self._numbers, np.diff(self._offsets)), self._numbers)

    def verify(self) -> tuple[PublishedGroup, ...]:
        """Reads and checks everything; gives the notice. Raises BadShard at the first fault."""
        with self._damage():
            self._file.verify()
            for name in self.texts()["example"]:
                name.decode()
        return self.notice()
