"""Log-probs over tiles of logits in torch: any device, any floating-point type.

Signatures and meaning are those of `reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pekoe.kernels.logprob import tiles
from pekoe.kernels.logprob.tiles import WEIGHTLESS, Four, Slopes, Statistics


class TorchEpilogue:
    """Implements `Epilogue` (`tiles.py`)."""

    sums_dtype: torch.dtype | None = None
    overwrites = True

    def take(
        self, tile: Tensor, targets: Tensor, first: int, temperature: float, moments: bool, known: Statistics
    ) -> None:
        place, inside = _places(tile, targets, first)
        picked = tile.gather(1, place).squeeze(1)
        known.picked.copy_(torch.where(inside, picked, known.picked))
        higher = torch.maximum(known.maximum, tile.amax(1))
        lowered = lowered_by(known.maximum - higher, temperature)
        shrink = lowered.exp()
        if moments:
            known.moment.add_(lowered * known.total).mul_(shrink)
        known.total.mul_(shrink)
        known.maximum.copy_(higher)
        q = tile.sub_(higher[:, None]).div_(temperature)
        weights = q.exp()
        known.total.add_(weights.sum(1))
        if moments:
            # A probability of 0 counts nothing, also where the logit is -inf.
            known.moment.add_(torch.linalg.vecdot(weights, q.clamp_(min=WEIGHTLESS)))

    def write_slopes(
        self, tile: Tensor, targets: Tensor, first: int, temperature: float, slopes: Slopes, out: Tensor
    ) -> None:
        place, inside = _places(tile, targets, first)
        q = torch.sub(tile, slopes.maximum[:, None], out=out).div_(temperature)
        weights = q.exp()
        q.clamp_(min=WEIGHTLESS).mul_(slopes.b[:, None]).add_(slopes.a[:, None]).mul_(weights)
        q.scatter_add_(1, place, torch.where(inside, slopes.c, torch.zeros_like(slopes.c))[:, None])


def lowered_by(difference: Tensor, temperature: float) -> Tensor:
    """q of a maximum against a higher one; finite also where there was none, so that 0 times it is 0."""
    return (difference / temperature).clamp_(min=-1e30)


def _places(tile: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Each row's column of the target [R, 1], 0 where the tile has it not; whether it has it [R]."""
    place = targets - first
    inside = (place >= 0) & (place < tile.shape[1])
    return torch.where(inside, place, torch.zeros_like(place))[:, None], inside


def hidden_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    num_valid: int,
    temperature: float,
    moments: bool,
) -> Four:
    return tiles.hidden_statistics(TorchEpilogue(), hidden, weight, bias, targets, num_valid, temperature, moments)


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
    return tiles.hidden_gradients(TorchEpilogue(), hidden, weight, bias, targets, num_valid, temperature, slopes, needs)


def logits_statistics(logits: Tensor, targets: Tensor, temperature: float, moments: bool, chunk_rows: int) -> Four:
    return tiles.logits_statistics(TorchEpilogue(), logits, targets, temperature, moments, chunk_rows)


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
    return tiles.logits_gradient(TorchEpilogue(), logits, targets, temperature, slopes, chunk_rows)
