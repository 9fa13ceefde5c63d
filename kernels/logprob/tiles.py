"""Logits of hidden states tile by tile: matrix products into one buffer, and an epilogue on each tile.

    forward     for columns: for rows:  tile = hidden[rows] · weight[columns]ᵀ  ──epilogue──► statistics of the rows
    backward    the same tile ──epilogue──► slopes, in place;  dhidden[rows] += slopes · weight[columns],
                                                              dweight[columns] += slopesᵀ · hidden[rows]

Legend: K rows (tokens), H features, V vocabulary, q = (x - maximum) / temperature for a logit x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pekoe.kernels.logprob.reference import Four, wide_dtype

ROWS = 1024
"""Rows of a tile, at most."""
ELEMENTS = 1 << 20
"""Logits of a tile: enough for products at full speed, few enough for a cache (4 MiB in float32) …"""
ELEMENTS_ELSEWHERE = 1 << 24
"""… and what fills an accelerator."""
COLUMNS = 4096
"""Columns of a tile on a processor, at most. Products of a few rows, or with few features, are added up there term
after term in float32, onto what they are added to: at 152,000 terms an error of 6e-5 of the gradient …"""
FEW = 64
"""… and so with fewer of them the sum of a tile is made by itself first."""
WIDENED_ELEMENTS = 1 << 21
"""Of the part of bfloat16 hidden states, or of such a weight, that is there in float32 (8 MiB)."""


@dataclass
class Statistics:
    """What is known of each row after some of its logits; all [K]."""

    maximum: Tensor
    """The largest logit; the lowest finite number before the first."""
    total: Tensor
    """Sum of exp(q)."""
    moment: Tensor
    """Sum of exp(q) q; 0 unless it was asked for."""
    picked: Tensor
    """The target's logit; 0 where no tile had it."""

    def of(self, rows: slice) -> Statistics:
        return Statistics(self.maximum[rows], self.total[rows], self.moment[rows], self.picked[rows])


@dataclass(frozen=True)
class Slopes:
    """The gradient with respect to the logits, as exp(q) (a + b q), plus c at the target; all [K]."""

    maximum: Tensor
    a: Tensor
    b: Tensor
    c: Tensor

    def of(self, rows: slice) -> Slopes:
        return Slopes(self.maximum[rows], self.a[rows], self.b[rows], self.c[rows])


class Epilogue(Protocol):
    """What is done with tiles of logits [R, C] whose first column is `first`; targets [R] count from column 0, and may
    lie outside."""

    sums_dtype: torch.dtype | None
    """Of the total and the moment; None is that of the logits."""
    overwrites: bool
    """Whether a tile is lost."""

    def take(
        self, tile: Tensor, targets: Tensor, first: int, temperature: float, moments: bool, known: Statistics
    ) -> None:
        """Updates the statistics of the rows."""

    def write_slopes(
        self, tile: Tensor, targets: Tensor, first: int, temperature: float, slopes: Slopes, out: Tensor
    ) -> None:
        """Into `out` [R, C], which may be the tile."""


ChooseEpilogue = Callable[[Tensor], Epilogue]
"""By the hidden states or the logits; with the first argument filled in, the functions below have the signatures of
`reference.py`."""


def _begin(num_rows: int, like: Tensor, sums_dtype: torch.dtype | None) -> Statistics:
    """Of rows without logits."""
    wide = wide_dtype(like.dtype)
    maximum = torch.full((num_rows,), torch.finfo(wide).min, dtype=wide, device=like.device)
    total = torch.zeros(num_rows, dtype=sums_dtype or wide, device=like.device)
    return Statistics(maximum, total, torch.zeros_like(total), torch.zeros_like(maximum))


def _finish(known: Statistics) -> Four:
    dtype = known.maximum.dtype
    return known.maximum, known.total.to(dtype), known.moment.to(dtype), known.picked


def hidden_statistics(
    choose: ChooseEpilogue,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    num_valid: int,
    temperature: float,
    moments: bool,
) -> Four:
    """See `reference.hidden_statistics`."""
    epilogue = choose(hidden)
    known = _begin(len(hidden), hidden, epilogue.sums_dtype)
    tiles = _Tiles(hidden, weight[:num_valid], bias)
    for columns in tiles.columns():
        for rows in tiles.rows():
            tile = tiles.logits(rows, columns)
            epilogue.take(tile, targets[rows], columns.start, temperature, moments, known.of(rows))
    return _finish(known)


def hidden_gradients(
    choose: ChooseEpilogue,
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
    """See `reference.hidden_gradients`."""
    epilogue, slopes = choose(hidden), Slopes(maximum, a, b, c)
    for_hidden, for_weight, for_bias = needs
    tiles = _Tiles(hidden, weight[:num_valid], bias)
    grad_hidden = hidden.new_empty(hidden.shape if for_hidden else 0, dtype=tiles.wide)
    grad_weight = weight.new_empty(weight.shape if for_weight else 0)
    grad_bias = hidden.new_empty(len(weight) if for_bias else 0, dtype=tiles.wide)
    empty = not (len(hidden) and num_valid)
    for grad, unseen in ((grad_hidden, 0), (grad_weight, num_valid), (grad_bias, num_valid)):
        grad[0 if empty else unseen or len(grad) :] = 0
    if empty:
        return grad_hidden, grad_weight, grad_bias
    narrow = for_weight and weight.dtype != tiles.wide
    strip = hidden.new_empty((tiles.width, weight.shape[1]) if narrow else 0, dtype=tiles.wide)
    for columns in tiles.columns():
        part = strip[: columns.stop - columns.start] if narrow else grad_weight[columns]
        for rows in tiles.rows():
            tile = tiles.logits(rows, columns)
            epilogue.write_slopes(tile, targets[rows], columns.start, temperature, slopes.of(rows), tile)
            if for_hidden:
                _add_product(grad_hidden[rows], tile, tiles.wide_weight, fresh=columns.start == 0)
            if for_weight:
                _add_product(part, tile.T, tiles.wide_hidden, fresh=rows.start == 0)
            if for_bias:
                sums = tile.sum(0)
                grad_bias[columns] = sums if rows.start == 0 else grad_bias[columns] + sums
        if narrow:
            grad_weight[columns] = part
    return grad_hidden, grad_weight, grad_bias


def logits_statistics(
    choose: ChooseEpilogue, logits: Tensor, targets: Tensor, temperature: float, moments: bool, chunk_rows: int
) -> Four:
    """See `reference.logits_statistics`."""
    epilogue = choose(logits)
    known = _begin(len(logits), logits, epilogue.sums_dtype)
    for rows in runs(len(logits), chunk_rows):
        epilogue.take(_chunk(epilogue, logits[rows]), targets[rows], 0, temperature, moments, known.of(rows))
    return _finish(known)


def logits_gradient(
    choose: ChooseEpilogue,
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    maximum: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_rows: int,
) -> Tensor:
    """See `reference.logits_gradient`."""
    epilogue, slopes = choose(logits), Slopes(maximum, a, b, c)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for rows in runs(len(logits), chunk_rows):
        chunk = _chunk(epilogue, logits[rows])
        out = grad[rows] if grad.dtype == chunk.dtype else torch.empty_like(chunk)
        epilogue.write_slopes(chunk, targets[rows], 0, temperature, slopes.of(rows), out)
        if grad.dtype != chunk.dtype:
            grad[rows] = out
    return grad


def _chunk(epilogue: Epilogue, logits: Tensor) -> Tensor:
    """In the wide dtype with contiguous rows; a copy where the epilogue writes over what it takes."""
    chunk = logits.to(wide_dtype(logits.dtype), copy=epilogue.overwrites)
    return chunk if chunk.stride(1) == 1 else chunk.contiguous()


def _add_product(target: Tensor, one: Tensor, other: Tensor, fresh: bool) -> None:
    if fresh:
        torch.mm(one, other, out=target)
    elif min(target.shape) < FEW:
        target += torch.mm(one, other)
    else:
        target.addmm_(one, other)


class _Tiles:
    """The logits of some rows and columns, in a buffer that is used again and again; and what they were made of."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self.wide = wide_dtype(hidden.dtype)
        size = max(1, hidden.shape[1])
        self.height = max(1, min(ROWS, len(hidden), WIDENED_ELEMENTS // size if hidden.dtype != self.wide else ROWS))
        on_cpu = hidden.device.type == "cpu"
        self.width = min(COLUMNS, ELEMENTS // self.height) if on_cpu else max(1, ELEMENTS_ELSEWHERE // self.height)
        if weight.dtype != self.wide:
            self.width = max(1, min(self.width, WIDENED_ELEMENTS // size))
        self.width = min(self.width, max(1, len(weight)))
        self._logits = _buffer(self.height * self.width, hidden, self.wide)
        self._wide_hidden = _buffer(self.height * size, hidden, self.wide) if hidden.dtype != self.wide else None
        self._wide_weight = _buffer(self.width * size, hidden, self.wide) if weight.dtype != self.wide else None
        self.wide_hidden, self.wide_weight = hidden, weight

    def columns(self) -> Iterator[slice]:
        for columns in runs(len(self._weight), self.width):
            self.wide_weight = _widened(self._weight[columns], self._wide_weight)
            yield columns

    def rows(self) -> Iterator[slice]:
        for rows in runs(len(self._hidden), self.height):
            self.wide_hidden = _widened(self._hidden[rows], self._wide_hidden)
            yield rows

    def logits(self, rows: slice, columns: slice) -> Tensor:
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        tile = self._logits[: shape[0] * shape[1]].view(shape)
        if self._bias is None:
            return torch.mm(self.wide_hidden, self.wide_weight.T, out=tile)
        bias = self._bias[columns].to(self.wide)
        return torch.addmm(bias, self.wide_hidden, self.wide_weight.T, out=tile)


def runs(count: int, size: int) -> Iterator[slice]:
    """0..count in slices of at most `size`."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _buffer(size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=like.device)


def _widened(part: Tensor, buffer: Tensor | None) -> Tensor:
    return part if buffer is None else buffer[: part.numel()].view(part.shape).copy_(part)
