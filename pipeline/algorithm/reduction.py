"""How the pure functions meet the other data-parallel ranks: three small reductions, passed in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pekoe.pipeline.records import Float64


class Reduction(Protocol):
    """Over the data-parallel ranks only, never the replicas that tensor, context or pipeline parallelism make.

    Each call is collective: all ranks make the same calls in the same order, those without rows too.
    """

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of a float64 tensor that has the same shape on all of them."""
        ...

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks of a float64 tensor that has the same shape on all of them."""
        ...

    def gather(self, array: Float64) -> Float64:
        """[N, k] all rows of all ranks, in rank order, from each one's [n, k]; n may differ and be 0."""
        ...


class OneRank:
    """The reduction where there is nobody else."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, array: Float64) -> Float64:
        return array
