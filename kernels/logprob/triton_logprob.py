"""Log-probs on accelerators: matrix products by the vendor's library, everything else in Triton.

    for each strip of the vocabulary, for each run of rows      tile = hidden · weightᵀ + bias      in float32
        statistics   merge_tile: the tile is merged into what is known of each row
        gradients    slope_tile: the tile becomes slopes; slopes · weight adds to dhidden, slopesᵀ · hidden to dweight

bfloat16 is multiplied as such, with products and sums in float32 (`torch.mm` with `out_dtype`) where the device has
that, else in float32; slopes are in the weight's dtype then. A row belongs to one program, which goes over its columns
in order: no atomics, the same bits every time. Kernels keep to the API of Triton 3.2 (NVIDIA and Ascend); what is read
lies inside the tensor. float64 is left to torch, as Ascend has none.

Signatures and meaning are those of `reference.py`.

Legend: K rows (tokens), H features, V vocabulary, q = (x - maximum) / temperature for a logit x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pekoe.kernels.logprob import torch_tiles
from pekoe.kernels.logprob.reference import Four
from pekoe.kernels.logprob.tiles import runs

TILE_ELEMENTS = 1 << 24
"""Logits that are there at a time: 64 MiB in float32."""
TILE_ROWS = 4096
"""Rows of a tile: with as many columns, adding up what tiles give costs little beside the products."""
MAX_PROGRAMS = 32768
"""Rows of a launch; Ascend takes 65535 programs."""
BLOCK = 2048
"""Columns that a program works on at a time."""
NUM_WARPS = 8
SUMS_IN_FLOAT32 = ("cuda",)
"""Device types whose products of bfloat16 or float16 come out in float32."""
LOWEST = torch.finfo(torch.float32).min


@triton.jit
def merge_tile(
    tile, bias, targets, maximum, total, moment, picked,
    num_columns, row_stride, first, inverse_temperature,
    has_bias: tl.constexpr, moments: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Merges the logits of a row, columns `first` … `first + num_columns` of the vocabulary, into its statistics."""
    row = tl.program_id(0).to(tl.int64)
    tile += row * row_stride
    top = tl.load(maximum + row)
    mass = tl.load(total + row)
    spread = tl.load(moment + row)
    columns = tl.arange(0, block)
    for start in range(0, num_columns, block):
        inside = start + columns < num_columns
        x = tl.load(tile + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        if has_bias:
            x += tl.load(bias + start + columns, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        # Finite also where there was no logit before, so that 0 times it is 0.
        lowered = tl.maximum((top - higher) * inverse_temperature, -1e30)
        shrink = tl.exp(lowered)
        q = (x - higher) * inverse_temperature
        weights = tl.exp(q)
        if moments:
            # A probability of 0 counts nothing, also where the logit is -inf.
            spread = shrink * (spread + lowered * mass) + tl.sum(weights * tl.maximum(q, -1e4), 0)
        mass = shrink * mass + tl.sum(weights, 0)
        top = higher
    tl.store(maximum + row, top)
    tl.store(total + row, mass)
    tl.store(moment + row, spread)
    place = tl.load(targets + row) - first
    if (place >= 0) & (place < num_columns):
        found = tl.load(tile + place).to(tl.float32)
        if has_bias:
            found += tl.load(bias + place).to(tl.float32)
        tl.store(picked + row, found)


@triton.jit
def slope_tile(
    tile, bias, targets, maximum, a, b, c, slopes,
    num_columns, row_stride, slope_stride, first, inverse_temperature,
    has_bias: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """exp(q) (a + b q), plus c at the target, of the logits of a row; `slopes` may be `tile`."""
    row = tl.program_id(0).to(tl.int64)
    tile += row * row_stride
    slopes += row * slope_stride
    top = tl.load(maximum + row)
    level = tl.load(a + row)
    tilt = tl.load(b + row)
    at_target = tl.load(c + row)
    place = tl.load(targets + row) - first
    columns = tl.arange(0, block)
    for start in range(0, num_columns, block):
        inside = start + columns < num_columns
        x = tl.load(tile + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        if has_bias:
            x += tl.load(bias + start + columns, mask=inside, other=0.0).to(tl.float32)
        q = (x - top) * inverse_temperature
        slope = tl.exp(q) * (level + tilt * tl.maximum(q, -1e4))
        slope += tl.where(start + columns == place, at_target, 0.0)
        tl.store(slopes + start + columns, slope.to(slopes.dtype.element_ty), mask=inside)


def hidden_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    num_valid: int,
    temperature: float,
    moments: bool,
) -> Four:
    if hidden.dtype == torch.float64:
        return torch_tiles.hidden_statistics(hidden, weight, bias, targets, num_valid, temperature, moments)
    places, known = targets.to(torch.int32), _begin(hidden)
    for columns in runs(num_valid, _width(hidden)):
        for rows in runs(len(hidden), TILE_ROWS):
            tile = _product(hidden[rows], weight[columns].T)
            _merge(tile, bias, places, rows, columns, temperature, moments, known)
    return known


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
    if hidden.dtype == torch.float64:
        return torch_tiles.hidden_gradients(
            hidden, weight, bias, targets, num_valid, temperature, maximum, a, b, c, needs
        )
    for_hidden, for_weight, for_bias = needs
    grad_hidden = hidden.new_zeros(hidden.shape if for_hidden else 0, dtype=torch.float32)
    grad_weight = weight.new_zeros(weight.shape if for_weight else 0)
    grad_bias = hidden.new_zeros(len(weight) if for_bias else 0, dtype=torch.float32)
    places, narrow = targets.to(torch.int32), _is_narrow(hidden, weight)
    for columns in runs(num_valid, _width(hidden)):
        strip = hidden.new_zeros(0)
        for rows in runs(len(hidden), TILE_ROWS):
            tile = _product(hidden[rows], weight[columns].T)
            slopes = torch.empty_like(tile, dtype=weight.dtype) if narrow else tile
            _slope(tile, bias, places, rows, columns, temperature, (maximum, a, b, c), slopes)
            if for_hidden:
                grad_hidden[rows] += _product(slopes, weight[columns])
            if for_weight:
                part = _product(slopes.T, hidden[rows])
                strip = part if rows.start == 0 else strip.add_(part)
            if for_bias:
                grad_bias[columns] += slopes.sum(0, dtype=torch.float32)
        if for_weight and len(hidden):
            grad_weight[columns] = strip
    return grad_hidden, grad_weight, grad_bias


def logits_statistics(logits: Tensor, targets: Tensor, temperature: float, moments: bool, chunk_rows: int) -> Four:
    if logits.dtype == torch.float64:
        return torch_tiles.logits_statistics(logits, targets, temperature, moments, chunk_rows)
    places, known, columns = targets.to(torch.int32), _begin(logits), slice(0, logits.shape[1])
    for rows in runs(len(logits), MAX_PROGRAMS):
        _merge(_in_rows(logits[rows]), None, places, rows, columns, temperature, moments, known)
    return known


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
    if logits.dtype == torch.float64:
        return torch_tiles.logits_gradient(logits, targets, temperature, maximum, a, b, c, chunk_rows)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    places, columns = targets.to(torch.int32), slice(0, logits.shape[1])
    for rows in runs(len(logits), MAX_PROGRAMS):
        _slope(_in_rows(logits[rows]), None, places, rows, columns, temperature, (maximum, a, b, c), grad[rows])
    return grad


def _begin(like: Tensor) -> Four:
    """Statistics of rows without logits."""
    maximum = torch.full((len(like),), LOWEST, dtype=torch.float32, device=like.device)
    return maximum, torch.zeros_like(maximum), torch.zeros_like(maximum), torch.zeros_like(maximum)


def _merge(
    tile: Tensor,
    bias: Tensor | None,
    places: Tensor,
    rows: slice,
    columns: slice,
    temperature: float,
    moments: bool,
    known: Four,
) -> None:
    merge_tile[(len(tile),)](
        tile, None if bias is None else bias[columns], places[rows], *(one[rows] for one in known),
        tile.shape[1], tile.stride(0), columns.start, 1 / temperature,
        has_bias=bias is not None, moments=moments, block=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip


def _slope(
    tile: Tensor,
    bias: Tensor | None,
    places: Tensor,
    rows: slice,
    columns: slice,
    temperature: float,
    parts: Four,
    slopes: Tensor,
) -> None:
    slope_tile[(len(tile),)](
        tile, None if bias is None else bias[columns], places[rows], *(one[rows] for one in parts), slopes,
        tile.shape[1], tile.stride(0), slopes.stride(0), columns.start, 1 / temperature,
        has_bias=bias is not None, block=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Matrix product in float32."""
    if _is_narrow(one, other):
        return torch.mm(one, other, out_dtype=torch.float32)
    return torch.mm(one.float(), other.float())


def _is_narrow(one: Tensor, other: Tensor) -> bool:
    """Whether both are multiplied as they are, in less than float32."""
    return one.dtype == other.dtype != torch.float32 and one.device.type in SUMS_IN_FLOAT32


def _in_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _width(hidden: Tensor) -> int:
    """Columns of a tile."""
    return max(1, TILE_ELEMENTS // max(1, min(TILE_ROWS, len(hidden))))
