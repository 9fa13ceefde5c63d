"""Log-probs over tiles of logits in torch: any device, any floating-point type.

Signatures and meaning are those of `reference.py`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pekoe.kernels.logprob import tiles
from pekoe.kernels.logprob.reference import WEIGHTLESS
from pekoe.kernels.logprob.tiles import Epilogue, Slopes, Statistics


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


def _epilogue(_: Tensor) -> Epilogue:
    return TorchEpilogue()


hidden_statistics = partial(tiles.hidden_statistics, _epilogue)
hidden_gradients = partial(tiles.hidden_gradients, _epilogue)
logits_statistics = partial(tiles.logits_statistics, _epilogue)
logits_gradient = partial(tiles.logits_gradient, _epilogue)
