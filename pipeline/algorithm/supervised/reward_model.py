"""Reward models from preferences: Bradley-Terry, `-log sigma(s_chosen - s_rejected)`, on the score at the last token.

The loss is the mean over the pairs of the whole batch over all ranks, so shares simply add up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pekoe.pipeline.algorithm.policy_terms import Batch
from pekoe.pipeline.algorithm.supervised.dpo import pair_statistics
from pekoe.pipeline.algorithm.supervised.pairs import split_pairs


class RewardModelLoss:
    """The loss of one batch of pairs, on a value head's outputs. Sequences come as chosen, rejected, chosen, …"""

    needs_entropy_gradient = False

    def __init__(self, num_pairs: int) -> None:
        """`num_pairs`: of the whole batch over all ranks."""
        self._num_pairs = max(num_pairs, 1)

    def __call__(self, values: Tensor, scores: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share from `scores` [S] (the head's output at each last token), and sums over its pairs.
        `values` [M] are not used."""
        chosen, rejected = split_pairs(scores)
        share = F.softplus(rejected - chosen).sum() / self._num_pairs
        stats = pair_statistics(chosen, rejected, ("score_chosen", "score_rejected"))
        stats["loss"] = share
        return share, {name: value.detach().to(torch.float64) for name, value in stats.items()}
