"""What an advantage estimator reads and gives. An estimator is one function, named in the registry or as
`module:function`.

    def estimator(terms: EstimatorTerms) -> tuple[Tensor, Tensor]      advantages [M], returns [M], both float64

Legend: M tokens laid end to end, S sequences of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pekoe.pipeline.algorithm.reduction import Reduction
from pekoe.pipeline.config.actor import ActorConfig


@dataclass(frozen=True)
class EstimatorTerms:
    """This rank's sequences of a step."""

    rewards: Tensor
    """[M] float64: outcome and turn rewards where they are earned; in token unit the KL reward, too."""
    mask: Tensor
    """[M] bool: tokens that train."""
    turns: Tensor
    """[M] int64: the turn of a sampled token, -1 elsewhere."""
    cu_seqlens: Tensor
    """[S+1] int64"""
    values: Tensor | None
    """[M] float64, the critic's; None without a critic."""
    bootstrap: Tensor | None
    """[S] float64: value after the last token, already 0 where the sequence is not truncated; None without a critic."""
    groups: Tensor
    """[S] int64: places in the sorted list of the step's groups, the same on all ranks."""
    num_groups: int
    samples: Tensor
    """[S] int64: the episode of the group that made the sequence."""
    config: ActorConfig
    over: Reduction
    """Reductions over data-parallel ranks: a group's sequences may lie on several. Every rank calls the estimator."""


Estimator = Callable[[EstimatorTerms], tuple[Tensor, Tensor]]
