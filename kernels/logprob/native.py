"""Log-probs with an epilogue in C, for float32 and less on the CPU; products are torch's, on all of its threads.

Signatures and meaning are those of `reference.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import torch
from torch import Tensor

from pekoe.kernels.logprob import tiles
from pekoe.kernels.logprob.tiles import Epilogue, Slopes, Statistics, runs
from pekoe.kernels.logprob.torch_tiles import TorchEpilogue
from pekoe.kernels.native.native_library import POINTER, REAL, SIZE, NativeFunctions, pointer

SHARED_ELEMENTS = 1 << 18
"""Logits of a tile that is worth a second thread (65 µs of one)."""

FUNCTIONS = NativeFunctions(
    {
        "logprob_statistics": (
            POINTER, SIZE, SIZE, SIZE, POINTER, SIZE, REAL, SIZE, POINTER, POINTER, POINTER, POINTER
        ),
        "logprob_gradient": (
            POINTER, SIZE, SIZE, SIZE, POINTER, SIZE, REAL, POINTER, POINTER, POINTER, POINTER, POINTER, SIZE
        ),
    }
)  # fmt: skip


class NativeEpilogue:
    """Implements `Epilogue` (`tiles.py`) for float32 whose rows are contiguous."""

    sums_dtype: torch.dtype | None = torch.float64
    overwrites = False

    def take(
        self, tile: Tensor, targets: Tensor, first: int, temperature: float, moments: bool, known: Statistics
    ) -> None:
        def work(rows: slice) -> None:
            part, found = tile[rows], known.of(rows)
            FUNCTIONS["logprob_statistics"](
                part.data_ptr(), *part.shape, part.stride(0), pointer(targets[rows]), first, temperature,
                moments, pointer(found.maximum), pointer(found.total), pointer(found.moment), pointer(found.picked),
            )  # fmt: skip

        _share(work, tile)

    def write_slopes(
        self, tile: Tensor, targets: Tensor, first: int, temperature: float, slopes: Slopes, out: Tensor
    ) -> None:
        def work(rows: slice) -> None:
            part, written, found = tile[rows], out[rows], slopes.of(rows)
            FUNCTIONS["logprob_gradient"](
                part.data_ptr(), *part.shape, part.stride(0), pointer(targets[rows]), first, temperature,
                pointer(found.maximum), pointer(found.a), pointer(found.b), pointer(found.c),
                written.data_ptr(), written.stride(0),
            )  # fmt: skip

        _share(work, tile)


def _share(work: Callable[[slice], None], tile: Tensor) -> None:
    """Does the rows of a tile, on as many threads as torch has. Rows are independent: results are the same bits."""
    num_rows = len(tile)
    num_threads = min(torch.get_num_threads(), num_rows, 1 + tile.numel() // SHARED_ELEMENTS)
    if num_threads == 1:
        work(slice(0, num_rows))
        return
    parts = list(runs(num_rows, -(-num_rows // num_threads)))
    others = [_threads(os.getpid(), torch.get_num_threads()).submit(work, rows) for rows in parts[1:]]
    work(parts[0])
    for other in others:
        other.result()


@cache
def _threads(process: int, num_threads: int) -> ThreadPoolExecutor:
    """Of this process: threads do not come along when one forks."""
    return ThreadPoolExecutor(num_threads - 1, "logprob")


def _epilogue(source: Tensor) -> Epilogue:
    """Torch's for float64, which C has not."""
    return TorchEpilogue() if source.dtype == torch.float64 else NativeEpilogue()


hidden_statistics = partial(tiles.hidden_statistics, _epilogue)
hidden_gradients = partial(tiles.hidden_gradients, _epilogue)
logits_statistics = partial(tiles.logits_statistics, _epilogue)
logits_gradient = partial(tiles.logits_gradient, _epilogue)
