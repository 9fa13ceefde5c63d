"""A file that carries the checksums of its own blocks, so that damage is found before anybody interprets the bytes.

    body (any bytes) | digest of each 16 KiB block of the body | footer: magic, format, block size, body length, digest

The seal lies behind the body: HDF5 ignores what follows its last address, so a sealed shard is still a plain HDF5 file
for every other tool. A reader verifies only the blocks that it touches. Blocks are hashed with XXH3, which runs at
the speed of memory: it finds damage, it is no defence against forgery.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pekoe.pipeline import files

BLOCK_BYTES = 16 * 1024
DIGEST_BYTES = 8
FORMAT = 2
MAGIC = b"PEKOEseal"
FOOTER = struct.Struct("<9sHIQ16s")
CACHED_BLOCKS = 256
CACHED_SPAN = 4
"""A read of at most so many blocks goes through the cache: neighbouring rows share blocks."""
STRETCH_BLOCKS = 32
WRITE_BACK_BYTES = 2 * 1024 * 1024
SYNC_FILE_RANGE_WRITE = 2
VERIFY_BYTES = 4 * 1024 * 1024

Bytes = npt.NDArray[Any]


class BrokenSeal(Exception):
    """The bytes of a file are not the bytes that were sealed; the text says what is wrong."""


class Sealer:
    """Passes a body on to `write` piece by piece and puts the seal behind it; copies at most a block of each piece."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        self._write = write
        self._digests: list[int] = []
        self._open_block = bytearray()
        self.body_bytes = 0

    def add(self, piece: Any) -> None:
        """The next bytes of the body: anything that is a contiguous buffer."""
        view = memoryview(piece).cast("B")
        if not view:
            return
        self._write(view)
        self.body_bytes += len(view)
        if self._open_block:
            missing = BLOCK_BYTES - len(self._open_block)
            self._open_block += view[:missing]
            view = view[missing:]
            if len(self._open_block) < BLOCK_BYTES:
                return
            self._digests.append(xxhash.xxh3_64_intdigest(self._open_block))
        whole = len(view) - len(view) % BLOCK_BYTES
        self._digests += block_digests(view[:whole])
        self._open_block = bytearray(view[whole:])

    def finish(self) -> None:
        """Writes the seal; nothing may be added any more."""
        if self._open_block:
            self._digests.append(xxhash.xxh3_64_intdigest(self._open_block))
        table = np.array(self._digests, "<u8").tobytes()
        digest = _table_digest(table, self.body_bytes)
        self._write(table + FOOTER.pack(MAGIC, FORMAT, BLOCK_BYTES, self.body_bytes, digest))


def seal(body: bytes) -> bytes:
    """The trailer to write directly behind `body`."""
    out = io.BytesIO()
    sealer = Sealer(out.write)
    sealer.add(body)
    sealer.finish()
    return out.getvalue()[len(body) :]


def publish_sealed(path: Path, pieces: Iterable[Any]) -> int:
    """Writes a body, piece by piece, and its seal as one new file, whole or not at all; gives the size of the file.

    Raises FileExistsError when the name is taken (what was published is never written again), OSError when the disk
    refuses, and whatever `pieces` raises; then the file is not there.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, "published already, never written again", str(path))
    part = files.part_name(path)
    try:
        size = _write_sealed(part, pieces)
        _rename(part, path)
        files.disk.sync_folder(path.parent)
    except BaseException:
        for left in (part, path):
            with suppress(OSError):
                files.disk.remove(left)
        raise
    return size


def _write_sealed(part: Path, pieces: Iterable[Any]) -> int:
    with files.disk.create(part) as file:
        sealer = Sealer(partial(files.disk.write, file))
        asked = 0
        for piece in pieces:
            sealer.add(piece)
            if sealer.body_bytes - asked >= WRITE_BACK_BYTES:
                _begin_write_back(file.fileno(), asked, sealer.body_bytes - asked)
                asked = sealer.body_bytes
        sealer.finish()
        files.disk.sync(file.fileno())
        return file.tell()


def _rename(part: Path, path: Path) -> None:
    """A network filesystem may say that a rename failed which it did: then only the new name is there."""
    try:
        files.disk.rename(part, path)
    except OSError:
        if part.exists() or not path.exists():
            raise


def _begin_write_back(descriptor: int, start: int, count: int) -> None:
    """Lets the kernel write these bytes to the disk while the next ones are prepared; a hint, whatever it answers."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, start, count, SYNC_FILE_RANGE_WRITE)


def _find_sync_file_range() -> Any:
    """Linux only, and not in Python's `os`."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


_sync_file_range = _find_sync_file_range()


def block_digests(data: Any) -> list[int]:
    """XXH3 of each block of some bytes; the last block may be shorter."""
    view = memoryview(data)
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)]


def _table_digest(table: bytes, body_bytes: int) -> bytes:
    return hashlib.blake2b(table + FOOTER.pack(MAGIC, FORMAT, BLOCK_BYTES, body_bytes, b""), digest_size=16).digest()


class SealedFile(io.RawIOBase):
    """The body of a sealed file, read only; every byte that it hands out was verified.

    Raises BrokenSeal for a file that is truncated, longer than sealed or altered; OSError as the filesystem gives it.
    Reads by position, so that a handle inherited by a forked process shares nothing with the parent's.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.bytes_read = 0
        self._position = 0
        self._blocks: OrderedDict[int, Bytes] = OrderedDict()
        self._descriptor = -1
        self._descriptor = files.disk.open(path)
        try:
            status = os.fstat(self._descriptor)
            self.digest = ""
            self.identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            self._digests, self._body_bytes = self._read_seal(status.st_size)
        except BaseException:
            self.close()
            raise

    def _read_seal(self, size: int) -> tuple[list[int], int]:
        if size < FOOTER.size:
            raise BrokenSeal(f"{size} bytes: too short, truncated")
        footer = self._read_at(size - FOOTER.size, FOOTER.size).tobytes()
        magic, version, block_bytes, body_bytes, digest = FOOTER.unpack(footer)
        if magic != MAGIC:
            raise BrokenSeal("no seal at the end: truncated, or not a shard")
        if version != FORMAT or block_bytes != BLOCK_BYTES:
            raise BrokenSeal(
                f"seal of format {version} with blocks of {block_bytes} bytes; {FORMAT}, {BLOCK_BYTES} wanted"
            )
        table_bytes = -(-body_bytes // BLOCK_BYTES) * DIGEST_BYTES
        if body_bytes + table_bytes + FOOTER.size != size:
            raise BrokenSeal(f"{size} bytes; the seal speaks of {body_bytes + table_bytes + FOOTER.size}")
        self.digest = str(digest.hex())
        table = self._read_at(body_bytes, table_bytes)
        if _table_digest(table.tobytes(), body_bytes) != digest:
            raise BrokenSeal("the seal itself is damaged")
        return table.view("<u8").tolist(), body_bytes

    def _read_at(self, position: int, count: int) -> Bytes:
        """Raw bytes, in memory of their own."""
        data: Bytes = np.empty(count, np.uint8)
        self._fill(data, position)
        return data

    def _fill(self, data: Bytes, position: int) -> None:
        view, filled = data.data, 0
        while filled < len(data):
            got = os.preadv(self._descriptor, [view[filled:]], position + filled)
            if not got:
                raise BrokenSeal(f"the file ends at byte {position + filled}: truncated while it was read")
            filled += got
        self.bytes_read += filled

    def _room(self, first: int, end: int) -> int:
        """Bytes of the blocks first..end-1."""
        return min(end * BLOCK_BYTES, self._body_bytes) - first * BLOCK_BYTES

    def _read_blocks(self, first: int, end: int) -> Bytes:
        """Verified bytes of the blocks first..end-1, in one read."""
        data: Bytes = np.empty(self._room(first, end), np.uint8)
        self._fill_blocks(data, first)
        return data

    def _fill_blocks(self, data: Bytes, first: int) -> None:
        """Reads and verifies a stretch at a time, while it is in the processor's cache."""
        start = first * BLOCK_BYTES
        for inside in range(0, len(data), STRETCH_BLOCKS * BLOCK_BYTES):
            stretch = data[inside : inside + STRETCH_BLOCKS * BLOCK_BYTES]
            self._fill(stretch, start + inside)
            found, block = block_digests(stretch), first + inside // BLOCK_BYTES
            wanted = self._digests[block : block + len(found)]
            if found != wanted:
                wrong = next(index for index, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])
                raise BrokenSeal(f"checksum of the block at byte {(block + wrong) * BLOCK_BYTES} is wrong")

    def _block(self, index: int) -> Bytes:
        """One verified block; a bounded number is kept."""
        if index in self._blocks:
            self._blocks.move_to_end(index)
            return self._blocks[index]
        self._blocks[index] = self._read_blocks(index, index + 1)
        if len(self._blocks) > CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return self._blocks[index]

    def verify(self) -> None:
        """Reads every block from the disk; raises BrokenSeal at the first damaged one."""
        num_blocks = -(-self._body_bytes // BLOCK_BYTES)
        step = VERIFY_BYTES // BLOCK_BYTES
        for first in range(0, num_blocks, step):
            self._read_blocks(first, min(first + step, num_blocks))

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[Bytes]:
        """Verified bytes of some ranges (position, count), writable, in memory that nobody else uses.

        Long ranges share one piece of memory: the system hands out one large piece much faster than several.
        Raises ValueError for a range outside of the body.
        """
        spans = [self._span(position, count) for position, count in ranges]
        long = [(first, end) for first, end in spans if end - first > CACHED_SPAN]
        room: Bytes = np.empty(sum(self._room(first, end) for first, end in long), np.uint8)
        found, used = [], 0
        for (position, count), (first, end) in zip(ranges, spans, strict=True):
            inside = position - first * BLOCK_BYTES
            if end - first > CACHED_SPAN:
                data = room[used : used + self._room(first, end)]
                used += len(data)
                self._fill_blocks(data, first)
                found.append(data[inside : inside + count])
            else:
                found.append(self._joined_blocks(first, end)[inside : inside + count].copy())
        return found

    def read_range(self, position: int, count: int) -> Bytes:
        """Verified bytes position..position+count-1, as `read_ranges` gives them."""
        return self.read_ranges([(position, count)])[0]

    def _span(self, position: int, count: int) -> tuple[int, int]:
        """The blocks (first, end) that a range touches."""
        if position < 0 or count < 0 or position + count > self._body_bytes:
            raise ValueError(f"bytes {position} to {position + count} of a body of {self._body_bytes}")
        return position // BLOCK_BYTES, -(-(position + count) // BLOCK_BYTES)

    def _joined_blocks(self, first: int, end: int) -> Bytes:
        if end == first + 1:
            return self._block(first)
        return np.concatenate([np.empty(0, np.uint8), *(self._block(index) for index in range(first, end))])

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        wanted = max(0, min(len(target), self._body_bytes - self._position))
        target[:wanted] = self.read_range(min(self._position, self._body_bytes), wanted).data
        self._position += wanted
        return wanted

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._body_bytes}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()
