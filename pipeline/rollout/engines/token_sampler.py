"""From logits to tokens and their log-probs, for all rows of a batch at once.

Each row is drawn by inverse CDF from one uniform number of its own, so what a sequence samples depends on its logits
and its seed, never on its neighbours. Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pekoe.pipeline.rollout.engine import SamplingParameters


def check_sampling(sampling: SamplingParameters) -> None:
    """Raises ValueError naming the key, the value and what is allowed."""
    if not 0 < sampling.temperature < float("inf"):
        raise ValueError(f"gconfig.temperature: {sampling.temperature}; allowed: above 0")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"gconfig.top_p: {sampling.top_p}; allowed: above 0, at most 1")
    if sampling.top_k < 0:
        raise ValueError(f"gconfig.top_k: {sampling.top_k}; allowed: 0 (all) or more")


class TokenSampler:
    """Samples for a fixed list of rows; None is an idle row (its result is never read)."""

    def __init__(self, rows: Sequence[SamplingParameters | None], device: torch.device) -> None:
        used = [row if row is not None else SamplingParameters(greedy=True) for row in rows]
        self._device = device
        self._temperature = torch.tensor([row.temperature for row in used], device=device)[:, None]
        self._greedy = torch.tensor([row.greedy for row in used], device=device)
        self._any_greedy = any(row.greedy for row in used)
        self.all_greedy = all(row.greedy for row in used)
        cut = [not row.greedy and (row.top_k > 0 or row.top_p < 1) for row in used]
        self._cut = torch.tensor([i for i, is_cut in enumerate(cut) if is_cut], device=device)
        self._any_cut = any(cut)
        kept = [row for row, is_cut in zip(used, cut, strict=True) if is_cut]
        self._top_k = torch.tensor([row.top_k or 1 << 31 for row in kept], device=device)[:, None]
        self._top_p = torch.tensor([row.top_p if row.top_p < 1 else 2.0 for row in kept], device=device)[:, None]

    def sample(
        self, logits: torch.Tensor, uniforms: Sequence[float], forbidden: Sequence[tuple[int, int]] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [B, V]; `forbidden` are (row, token) that may not be drawn. Gives tokens [B] and log-probs [B].

        The log-prob is of the full distribution at the row's temperature, in float32 (float64 for float64 logits),
        whatever top-k, top-p or `forbidden` leave to draw from; so for greedy rows too.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs = torch.log_softmax(logits / self._temperature.to(logits.dtype), dim=-1)
        allowed = logprobs
        if forbidden:
            rows, tokens = zip(*forbidden, strict=True)
            allowed = logprobs.clone()
            allowed[list(rows), list(tokens)] = float("-inf")
        if self.all_greedy:
            chosen = allowed.argmax(dim=-1)
        else:
            chosen = self._draw(allowed, uniforms)
            if self._any_greedy:
                chosen = torch.where(self._greedy, allowed.argmax(dim=-1), chosen)
        return chosen, logprobs.gather(1, chosen[:, None])[:, 0]

    def _draw(self, allowed: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
        weights = allowed.exp()
        if self._any_cut:
            weights[self._cut] = keep_likeliest(weights[self._cut], self._top_k, self._top_p)
        cumulated = weights.cumsum(dim=-1)
        total = cumulated[:, -1:]
        uniform = torch.tensor(uniforms, dtype=cumulated.dtype, device=self._device)[:, None]
        below_total = torch.nextafter(total, torch.zeros_like(total))
        target = torch.minimum(uniform * total, below_total)
        chosen = torch.searchsorted(cumulated, target, right=True)[:, 0]
        return chosen.clamp_max(allowed.shape[1] - 1)  # logits that are not a number point past the end


def keep_likeliest(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """weights [B, V], top_k, top_p [B, 1]: zero but for the k likeliest, of these the fewest with a share of top_p."""
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[1], device=weights.device)[None]
    ordered = ordered.masked_fill(ranks >= top_k, 0)
    mass_before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(mass_before >= top_p * ordered.sum(dim=-1, keepdim=True), 0)
    return torch.zeros_like(weights).scatter_(1, index, ordered)
