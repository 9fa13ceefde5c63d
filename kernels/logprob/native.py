"""Log-probs with an epilogue in C, for float32 and less on the CPU; products are torch's, on all of its threads.

Signatures and meaning are those of `reference.py`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from pekoe.kernels.logprob import tiles
from pekoe.kernels.logprob.tiles import Epilogue, Four, Slopes, Statistics, runs
from pekoe.kernels.logprob.torch_tiles import TorchEpilogue
from pekoe.kernels.native.native_library import native_library, pointer

SHARED_ELEMENTS = 1 << 18
"""Logits of a tile that is worth a second thread (65 µs of one)."""

P, SIZE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
SIGNATURES = {
    "statistics": (P, SIZE, SIZE, SIZE, P, SIZE, REAL, SIZE, P, P, P, P),
    "gradient": (P, SIZE, SIZE, SIZE, P, SIZE, REAL, P, P, P, P, P, SIZE),
}


class NativeEpilogue:
    """Implements `Epilogue` (`tiles.py`) for float32 whose rows are contiguous."""

    sums_dtype: torch.dtype | None = torch.float64
    overwrites = False

    def take(
        self, tile: Tensor, targets: Tensor, first: int, temperature: float, moments: bool, known: Statistics
    ) -> None:
        def work(rows: slice) -> None:
            part, found = tile[rows], known.of(rows)
            _function("statistics")(
                part.data_ptr(), *part.shape, part.stride(0), pointer(targets[rows]), first, temperature,
                moments, pointer(found.maximum), pointer(found.total), pointer(found.moment), pointer(found.picked),
            )  # fmt: skip

        _share(work, tile)

    def write_slopes(
        self, tile: Tensor, targets: Tensor, first: int, temperature: float, slopes: Slopes, out: Tensor
    ) -> None:
        def work(rows: slice) -> None:
            part, written, found = tile[rows], out[rows], slopes.of(rows)
            _function("gradient")(
                part.data_ptr(), *part.shape, part.stride(0), pointer(targets[rows]), first, temperature,
                pointer(found.maximum), pointer(found.a), pointer(found.b), pointer(found.c),
                written.data_ptr(), written.stride(0),
            )  # fmt: skip

        _share(work, tile)


@cache
def _function(name: str) -> ctypes._NamedFuncPointer:
    function = getattr(native_library(), f"pekoe_logprob_{name}")
    function.argtypes, function.restype = SIGNATURES[name], None
    return function  # type: ignore[no-any-return]


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


def hidden_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    num_valid: int,
    temperature: float,
    moments: bool,
) -> Four:
    return tiles.hidden_statistics(_epilogue(hidden), hidden, weight, bias, targets, num_valid, temperature, moments)


def hidden_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    num_valid: int,
    temperature: float,
    maximum: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    slopes = Slopes(maximum, a, b, c)
    return tiles.hidden_gradients(
        _epilogue(hidden), hidden, weight, bias, targets, num_valid, temperature, slopes, needs
    )


def logits_statistics(logits: Tensor, targets: Tensor, temperature: float, moments: bool, chunk_rows: int) -> Four:
    return tiles.logits_statistics(_epilogue(logits), logits, targets, temperature, moments, chunk_rows)


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    maximum: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_rows: int,
) -> Tensor:
    slopes = Slopes(maximum, a, b, c)
    return tiles.logits_gradient(_epilogue(logits), logits, targets, temperature, slopes, chunk_rows)


def _epilogue(source: Tensor) -> Epilogue:
    """Torch's for float64, which C has not."""
    return TorchEpilogue() if source.dtype == torch.float64 else NativeEpilogue()
