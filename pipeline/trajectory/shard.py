"""One HDF5 file that holds whole groups: written once, immutable from then on, every byte verified when it is read.

The file is built in memory and reaches the disk through `files.write_bytes` (temporary name, fsync, rename), so HDF5
never sees a full disk, a lock or a half-written file. Readers never open a file that is still being written.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pekoe.pipeline import files
from pekoe.pipeline.messages import PublishedGroup
from pekoe.pipeline.records import Group, Int64, Trajectory
from pekoe.pipeline.trajectory import schema
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.sealed_file import BrokenSeal, SealedFile, seal

os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"
import h5py  # type: ignore[import-untyped]

SUFFIX = ".h5"
NOT_THERE_YET = (errno.ENOENT, errno.ESTALE)


class BadShard(Exception):
    """A shard that cannot be used; nothing of it was handed out by the call that raised."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def write_shard(path: Path, groups: Sequence[Group], attributes: ShardAttributes) -> int:
    """Publishes groups as one file, durably; gives its size in bytes.

    Raises ValueError for an unsound trajectory or when there is none, OSError when the disk refuses (then no file of
    this name exists and the temporary one is removed).
    """
    if not any(group.trajectories for group in groups):
        raise ValueError(f"shard {path}: no trajectory to write")
    data = encode_shard(groups, attributes)
    files.write_bytes(path, data)
    return len(data)


def encode_shard(groups: Sequence[Group], attributes: ShardAttributes) -> bytes:
    """The bytes of a sealed shard; equal input gives equal bytes."""
    image = io.BytesIO()
    with h5py.File(image, "w", libver=("earliest", "v110"), locking=False) as file:
        file.attrs["schema_version"] = schema.SCHEMA_VERSION
        file.attrs.update(asdict(attributes))
        tokens = file.create_group("tokens")
        for name, column in schema.token_arrays(groups).items():
            tokens.create_dataset(name, data=column)
        sequences = file.create_group("sequences")
        for name, column in schema.sequence_arrays(groups).items():
            sequences.create_dataset(name, data=column)
        for name, texts in schema.sequence_texts(groups).items():
            sequences.create_dataset(name, data=texts, dtype=h5py.string_dtype())
    image.seek(0, os.SEEK_END)
    image.write(seal(image.getvalue()))
    return image.getvalue()


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
                self._columns = {name: self._hdf5["tokens"][name] for name in schema.TOKEN_COLUMNS}
                self._info = self._hdf5["sequences"]["info"]
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
    def identity(self) -> tuple[int, int]:
        """Size and modification time (ns) of the file behind this handle."""
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
        return ShardAttributes(
            run=str(found["run"]),
            attempt=int(found["attempt"]),
            writer=str(found["writer"]),
            temperature=float(found["temperature"]),
            logprob_convention=str(found["logprob_convention"]),
        )

    def _read_numbers(self) -> tuple[Int64, dict[str, npt.NDArray[Any]]]:
        sequences = self._hdf5["sequences"]
        offsets: Int64 = sequences["offset"][:]
        numbers = {name: sequences[name][:] for name in schema.SEQUENCE_COLUMNS}
        n = len(offsets) - 1
        if n < 1 or offsets[0] != 0 or (np.diff(offsets) <= 0).any():
            raise ValueError("offsets do not rise from 0")
        for name in (*schema.SEQUENCE_COLUMNS, *schema.TEXT_COLUMNS):
            if len(sequences[name]) != n:
                raise ValueError(f"/sequences/{name} has {len(sequences[name])} entries for {n} sequences")
        for name in schema.TOKEN_COLUMNS:
            if len(self._hdf5["tokens"][name]) != offsets[-1]:
                raise ValueError(
                    f"/tokens/{name} has {len(self._hdf5['tokens'][name])} entries for {offsets[-1]} tokens"
                )
        return offsets, numbers

    def group_numbers(self) -> list[int]:
        """Admission number of each row."""
        return [int(number) for number in self._numbers["group"]]

    def read(self, rows: Sequence[int]) -> list[tuple[int, Trajectory]]:
        """(group number, trajectory) of the rows, in the order asked; reads their bytes only."""
        for row in rows:
            if not 0 <= row < self.num_rows:
                raise BadShard(self.path, f"row {row} of {self.num_rows}")
        found: dict[int, Trajectory] = {}
        with self._damage():
            for first, end in _runs(sorted(set(rows))):
                found.update(zip(range(first, end), self._read_run(first, end), strict=True))
        return [(int(self._numbers["group"][row]), found[row]) for row in rows]

    def _read_run(self, first: int, end: int) -> list[Trajectory]:
        """Rows first..end-1, which lie side by side: one read per column."""
        offsets = self._offsets[first : end + 1]
        tokens = {name: column[offsets[0] : offsets[-1]] for name, column in self._columns.items()}
        infos = self._info[first:end]
        trajectories = []
        for index, row in enumerate(range(first, end)):
            inside = slice(offsets[index] - offsets[0], offsets[index + 1] - offsets[0])
            trajectory = schema.trajectory_of(
                {name: column[inside] for name, column in tokens.items()},
                {name: column[row] for name, column in self._numbers.items()},
                infos[index].decode(),
            )
            trajectory.check()
            trajectories.append(trajectory)
        return trajectories

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

    def notice(self) -> tuple[PublishedGroup, ...]:
        """The groups as the notice of this shard named them."""
        return schema.notice_groups(self.groups())

    def verify(self) -> None:
        """Reads and checks everything; raises BadShard at the first fault."""
        with self._damage():
            self._file.verify()
        self.groups()
