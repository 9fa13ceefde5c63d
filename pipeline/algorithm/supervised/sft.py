"""Supervised fine-tuning: `-sum m logp / N` over labelled tokens.

N is the number of labels of the whole batch over all ranks, so the shares of micro-batches and ranks simply add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.policy_terms import Batch


class SftLoss:
    """The loss of one batch; implements the trainer's `LossFunction`. Reads `loss_mask` [M]."""

    needs_entropy_gradient = False

    def __init__(self, num_labels: int) -> None:
        """`num_labels`: of the whole batch over all ranks."""
        self._num_labels = max(num_labels, 1)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the loss, and sums of statistics."""
        mask = batch["loss_mask"].to(torch.bool)
        total = -torch.where(mask, logprobs, torch.zeros_like(logprobs)).sum()
        share = total / self._num_labels
        stats = {"loss": share, "labels": mask.sum()}
        return share, {name: value.detach().to(torch.float64) for name, value in stats.items()}
