"""A rank whose heap is full of freed memory that cannot be compressed, as after large imports; it joins a world."""

from __future__ import annotations

import ctypes
import os
import sys

from pekoe.launch.world import World

allocator = ctypes.CDLL(None)
allocator.malloc.restype = ctypes.c_void_p
allocator.malloc.argtypes = [ctypes.c_size_t]
allocator.free.argtypes = [ctypes.c_void_p]


def fill_heap() -> None:
    """Pieces of all sizes, freed one by one; others stay between them, so that they do not become one again."""
    pieces = []
    for size in [*range(1040, 9000, 16), *[20_000, 40_000, 100_000] * 5] * 4:
        piece = allocator.malloc(size)
        ctypes.memmove(piece, os.urandom(size), size)
        pieces.append(piece)
        allocator.malloc(1040)
    for piece in pieces:
        allocator.free(piece)


fill_heap()
with World.join(int(sys.argv[1])) as world:
    # One write: ranks share the output, and `print` writes text and end apart where Python is unbuffered.
    os.write(1, f"rank {world.rank} of {world.size}\n".encode())
