"""Lets HDF5 lay a file out without handing it the large columns, so that these go to the disk with no copy in between.

HDF5 writes names, attributes and small datasets into sparse memory and reserves contiguous room for each large column.
The file is then the small pieces and the columns in the order of their addresses. Nothing of the large columns is held
here: `pieces` asks for each when its turn has come.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"
import h5py  # type: ignore[import-untyped]

__all__ = ["Layout", "SparseMemory", "h5py", "lay_out"]

PAGE_BYTES = 4096
ALIGNMENT = 64
"""Datasets begin at multiples of it, so that their bytes can be used as arrays where they lie."""


class SparseMemory(io.RawIOBase):
    """A file in memory of which only the pages that were written take room; the others are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self._pages: dict[int, bytearray] = {}
        self._position = 0
        self.num_bytes = 0

    def read_range(self, start: int, count: int) -> bytes:
        """Bytes start..start+count-1."""
        found = bytearray(count)
        for page, inside, at, size in _spans(start, count):
            if page in self._pages:
                found[at : at + size] = self._pages[page][inside : inside + size]
        return bytes(found)

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        target[:] = self.read_range(self._position, len(target))
        self._position += len(target)
        return len(target)

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        for page, inside, at, size in _spans(self._position, len(view)):
            self._pages.setdefault(page, bytearray(PAGE_BYTES))[inside : inside + size] = view[at : at + size]
        self._position += len(view)
        self.num_bytes = max(self.num_bytes, self._position)
        return len(view)

    def truncate(self, size: int | None = None, /) -> int:
        self.num_bytes = self._position if size is None else size
        return self.num_bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.num_bytes}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _spans(start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """A range of bytes page by page: page, first byte inside it, first byte inside the range, number of bytes."""
    at = 0
    while at < count:
        page, inside = divmod(start + at, PAGE_BYTES)
        size = min(PAGE_BYTES - inside, count - at)
        yield page, inside, at, size
        at += size


@dataclass(frozen=True)
class Reserved:
    """Room for one large column."""

    name: str
    position: int
    num_bytes: int


class Layout:
    """An HDF5 file of small content and of large columns that are still to be filled in."""

    def __init__(self, memory: SparseMemory, reserved: Iterable[Reserved]) -> None:
        self._memory = memory
        self._reserved = sorted(reserved, key=lambda column: column.position)

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return self._memory.num_bytes

    def pieces(self, column: Callable[[str], Iterable[Any]]) -> Iterator[Any]:
        """The bytes of the file in order. `column` gives the content of a large column as buffers laid end to end.

        Raises ValueError when a column has another size than the room for it.
        """
        position = 0
        for room in self._reserved:
            yield self._memory.read_range(position, room.position - position)
            size = 0
            for piece in column(room.name):
                size += memoryview(piece).nbytes
                yield piece
            if size != room.num_bytes:
                raise ValueError(f"column {room.name}: {size} bytes for a room of {room.num_bytes}")
            position = room.position + room.num_bytes
        yield self._memory.read_range(position, self.num_bytes - position)


def lay_out(
    attributes: Mapping[str, Any],
    columns: Mapping[str, tuple[int, np.dtype[Any]]],
    numbers: Mapping[str, np.ndarray[Any, Any]],
    texts: Mapping[str, list[bytes]],
) -> Layout:
    """A file with these attributes and datasets, named by their paths in the file; equal input gives equal bytes.

    `columns` are the large ones (number of entries, dtype), contiguous and unfiltered; `texts` are UTF-8.
    """
    memory = SparseMemory()
    with h5py.File(
        memory,
        "w",
        libver=("earliest", "v110"),
        locking=False,
        alignment_threshold=ALIGNMENT,
        alignment_interval=ALIGNMENT,
    ) as file:
        file.attrs.update(attributes)
        for folder in dict.fromkeys(name.rpartition("/")[0] for name in (*numbers, *texts, *columns)):
            file.create_group(folder)
        for name, values in numbers.items():
            stored = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
            _create(file, name, stored.dtype, len(stored)).write(h5py.h5s.ALL, h5py.h5s.ALL, stored)
        for name, lines in texts.items():
            _write_texts(file, name, lines)
        reserved = [_reserve(file, name, length, dtype) for name, (length, dtype) in columns.items()]
    return Layout(memory, reserved)


def _write_texts(file: h5py.File, name: str, lines: list[bytes]) -> None:
    """Strings of one length where that wastes little (many times faster), else each of its own."""
    longest, total = max(map(len, lines), default=0), sum(map(len, lines))
    if longest * len(lines) <= 2 * total + PAGE_BYTES:
        file.create_dataset(name, data=np.array(lines, h5py.string_dtype("utf-8", max(longest, 1))))
    else:
        file.create_dataset(name, data=np.array(lines, object), dtype=h5py.string_dtype())


def _reserve(file: h5py.File, name: str, length: int, dtype: np.dtype[Any]) -> Reserved:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_layout(h5py.h5d.CONTIGUOUS)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plan.set_obj_track_times(False)
    made = _create(file, name, dtype.newbyteorder("<"), length, plan)
    return Reserved(name, made.get_offset(), length * dtype.itemsize)


def _create(file: h5py.File, name: str, dtype: np.dtype[Any], length: int, plan: Any = None) -> Any:
    """A numeric dataset, by the library's own calls: the convenient ones take three times as long."""
    if plan is None:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_obj_track_times(False)
    return h5py.h5d.create(
        file.id, name.encode(), h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple((length,)), dcpl=plan
    )
