"""The critic's loss on packed, token-aligned tensors.

    0.5 max((V - R)^2, (V_clip - R)^2) over the active tokens,   V_clip = V_old + clamp(V - V_old, -eps_clip, eps_clip)

Source: Schulman et al. 2017 (PPO, as implemented). Legend: M tokens of a micro-batch laid end to end, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.objective import active_mask
from pekoe.pipeline.algorithm.policy_statistics import maximum
from pekoe.pipeline.algorithm.policy_terms import Batch
from pekoe.pipeline.algorithm.segments import sequence_index
from pekoe.pipeline.config.companions import CriticConfig


class ValueObjective:
    """The loss of one minibatch of a step; reads `cu_seqlens`, `loss_mask`, `truncated`, `values` (those of the step's
    start) and `returns` [M] of a batch.

    `num_active` is the number of active tokens of the whole minibatch over all ranks (without truncated sequences when
    `mask_truncated`).
    """

    needs_entropy_gradient = False

    def __init__(self, config: CriticConfig, num_active: int, mask_truncated: bool = False) -> None:
        self._eps_clip = config.eps_clip
        self._num_active = max(num_active, 1)
        self._mask_truncated = mask_truncated

    def __call__(self, values: Tensor, scores: Tensor | None, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the loss for `values` [M], and sums of statistics over `tokens`."""
        mask = active_mask(batch, sequence_index(batch["cu_seqlens"]), self._mask_truncated)

        def active(tensor: Tensor) -> Tensor:
            return torch.where(mask, tensor.to(values.dtype), torch.zeros_like(values))

        now, old, returns = active(values), active(batch["values"]), active(batch["returns"])
        token_loss, clipped = clipped_value_loss(now, old, returns, self._eps_clip)
        loss = token_loss.sum() / self._num_active
        with torch.no_grad():
            stats = {
                "tokens": mask.sum(),
                "loss": loss,
                "clipped": (clipped & mask).sum(),
                "change": (now - old).abs().sum(),
                "error_max": maximum((returns - now).abs()),
            }
        return loss, {name: value.detach().to(torch.float64) for name, value in stats.items()}


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, eps_clip: float | None) -> tuple[Tensor, Tensor]:
    """(losses, clipped) per token; without `eps_clip` half the squared error, and nothing is clipped."""
    squares = (values - returns).square()
    if eps_clip is None:
        return 0.5 * squares, torch.zeros_like(squares, dtype=torch.bool)
    bounded = (old + (values - old).clamp(-eps_clip, eps_clip) - returns).square()
    # Inside the bound `old + (values - old)` differs from `values` by rounding.
    is_outside = (values - old).abs() > eps_clip
    return 0.5 * torch.maximum(squares, bounded), is_outside & (bounded > squares)
