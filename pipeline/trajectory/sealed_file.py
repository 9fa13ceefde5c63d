"""A file that carries the checksums of its own blocks, so that damage is found before anybody interprets the bytes.

    body (any bytes) | digest of each 16 KiB block of the body | footer: magic, format, block size, body length, digest

The seal lies behind the body: HDF5 ignores what follows its last address, so a sealed shard is still a plain HDF5 file
for every other tool. A reader verifies only the blocks that it touches.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

from pekoe.pipeline import files

BLOCK_BYTES = 16 * 1024
DIGEST_BYTES = 8
FORMAT = 1
MAGIC = b"PEKOEseal"
FOOTER = struct.Struct("<9sHIQ16s")
CACHED_BLOCKS = 256
VERIFY_BYTES = 4 * 1024 * 1024


class BrokenSeal(Exception):
    """The bytes of a file are not the bytes that were sealed; the text says what is wrong."""


def seal(body: bytes) -> bytes:
    """The trailer to write directly behind `body`."""
    view = memoryview(body)
    table = b"".join(_digest(view[start : start + BLOCK_BYTES]) for start in range(0, len(body), BLOCK_BYTES))
    return table + FOOTER.pack(MAGIC, FORMAT, BLOCK_BYTES, len(body), _table_digest(table, len(body)))


def _digest(block: Any) -> bytes:
    return hashlib.blake2b(block, digest_size=DIGEST_BYTES).digest()


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
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._descriptor = -1
        self._descriptor = files.disk.open(path)
        try:
            status = os.fstat(self._descriptor)
            self.identity = (status.st_size, status.st_mtime_ns)
            self._table, self._body_bytes = self._read_seal(status.st_size)
        except BaseException:
            self.close()
            raise

    def _read_seal(self, size: int) -> tuple[bytes, int]:
        if size < FOOTER.size:
            raise BrokenSeal(f"{size} bytes: too short, truncated")
        footer = self._read_at(size - FOOTER.size, FOOTER.size)
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
        table = self._read_at(body_bytes, table_bytes)
        if _table_digest(table, body_bytes) != digest:
            raise BrokenSeal("the seal itself is damaged")
        return table, body_bytes

    def _read_at(self, position: int, count: int) -> bytes:
        pieces = []
        while count > 0:
            piece = os.pread(self._descriptor, count, position)
            if not piece:
                raise BrokenSeal(f"the file ends at byte {position}: truncated while it was read")
            pieces.append(piece)
            position += len(piece)
            count -= len(piece)
        data = b"".join(pieces)
        self.bytes_read += len(data)
        return data

    def _read_blocks(self, first: int, end: int) -> bytes:
        """Verified bytes of the blocks first..end-1, in one read."""
        start = first * BLOCK_BYTES
        data = self._read_at(start, min(end * BLOCK_BYTES, self._body_bytes) - start)
        view = memoryview(data)
        for index in range(first, end):
            inside = (index - first) * BLOCK_BYTES
            if (
                _digest(view[inside : inside + BLOCK_BYTES])
                != self._table[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            ):
                raise BrokenSeal(f"checksum of the block at byte {index * BLOCK_BYTES} is wrong")
        return data

    def _block(self, index: int) -> bytes:
        """One verified block; neighbouring rows share blocks, so a bounded number is kept."""
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

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        wanted = max(0, min(len(target), self._body_bytes - self._position))
        if wanted == 0:
            return 0
        first, inside = divmod(self._position, BLOCK_BYTES)
        end = (self._position + wanted - 1) // BLOCK_BYTES + 1
        data = self._block(first) if end == first + 1 else self._read_blocks(first, end)
        target[:wanted] = memoryview(data)[inside : inside + wanted]
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
