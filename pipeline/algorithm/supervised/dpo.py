"""Direct preference optimisation: the sigmoid form (Rafailov et al. 2023, arXiv:2305.18290) and IPO (Azar et al. 2023,
arXiv:2310.12036).

    d       = (pi_chosen - pi_rejected) - (ref_chosen - ref_rejected)
    sigmoid = -log sigma(beta d)                      on sums of log-probs over a completion
    ipo     = (d - 1 / (2 beta))^2                    on their means per token

The loss is the mean over the pairs of the whole batch over all ranks, so shares simply add up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pekoe.pipeline.algorithm.policy_terms import Batch
from pekoe.pipeline.algorithm.supervised.pairs import labelled_means, labelled_sums, split_pairs
from pekoe.pipeline.config.companions import DpoConfig


class DpoLoss:
    """The loss of one batch of pairs; implements the trainer's `LossFunction`.

    Reads `loss_mask` [M], `cu_seqlens` [S+1] and `ref_logprobs` [M] (0 where the mask is 0). Sequences come as chosen,
    rejected, chosen, rejected.
    """

    needs_entropy_gradient = False

    def __init__(self, config: DpoConfig, num_pairs: int) -> None:
        """`num_pairs`: of the whole batch over all ranks."""
        self._beta, self._form = config.beta, config.loss_type
        self._num_pairs = max(num_pairs, 1)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the loss, and sums over its pairs."""
        gap = logprobs - batch["ref_logprobs"].to(logprobs.dtype)
        over_tokens = labelled_means if self._form == "ipo" else labelled_sums
        chosen, rejected = split_pairs(over_tokens(gap, batch["loss_mask"], batch["cu_seqlens"]))
        share = preference_losses(chosen - rejected, self._beta, self._form).sum() / self._num_pairs
        stats = pair_statistics(self._beta * chosen, self._beta * rejected, ("reward_chosen", "reward_rejected"))
        stats["loss"] = share
        stats["labels"] = batch["loss_mask"].sum()
        return share, {name: value.detach().to(torch.float64) for name, value in stats.items()}


def preference_losses(margins: Tensor, beta: float, form: str) -> Tensor:
    """[P] losses of margins [P] (log-ratio of the chosen minus that of the rejected side)."""
    if form == "sigmoid":
        return F.softplus(-beta * margins)
    if form == "ipo":
        return (margins - 1 / (2 * beta)) ** 2
    raise ValueError(f"dpo.loss_type: {form!r} is not allowed; allowed: sigmoid, ipo")


def pair_statistics(chosen: Tensor, rejected: Tensor, names: tuple[str, str]) -> dict[str, Tensor]:
    """Sums over pairs of the two sides [P] each: their values under `names`, margins, and how often the chosen one is
    above."""
    return {
        "pairs": torch.full((), len(chosen), dtype=torch.float64, device=chosen.device),
        "accuracy": (chosen > rejected).sum(),
        "margin": (chosen - rejected).sum(),
        names[0]: chosen.sum(),
        names[1]: rejected.sum(),
    }
