"""From logits to tokens and their log-probs, for all rows of a batch at once.

Each row is drawn by inverse CDF from one uniform number of its own, so what a sequence samples depends on its logits
and its seed, never on its neighbours. A log-prob is of the full distribution at the row's temperature: before bias,
penalty, ban, top-k and top-p, which only decide what may be drawn. Legend: B rows, P penalised rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pekoe.pipeline.rollout.engine import SamplingParameters

FORBIDDING_BIAS = -100.0
"""A bias of this forbids its token, as in OpenAI's interface."""
LARGEST_PENALTY = 2.0


def check_sampling(sampling: SamplingParameters, vocabulary: int) -> None:
    """Raises ValueError naming the key, the value and what is allowed."""
    if not 0 < sampling.temperature < float("inf"):
        raise ValueError(f"gconfig.temperature: {sampling.temperature}; allowed: above 0")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"gconfig.top_p: {sampling.top_p}; allowed: above 0, at most 1")
    if sampling.top_k < 0:
        raise ValueError(f"gconfig.top_k: {sampling.top_k}; allowed: 0 (all) or more")
    if not -LARGEST_PENALTY <= sampling.frequency_penalty <= LARGEST_PENALTY:
        raise ValueError(f"gconfig.frequency_penalty: {sampling.frequency_penalty}; allowed: -2 to 2")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocabulary:
            raise ValueError(f"gconfig.logit_bias: token {token}; allowed: 0 to {vocabulary - 1}")
        if not abs(bias) <= -FORBIDDING_BIAS:
            raise ValueError(f"gconfig.logit_bias: {bias} for token {token}; allowed: -100 to 100")
    if sum(bias == FORBIDDING_BIAS for _, bias in sampling.logit_bias) >= vocabulary:
        raise ValueError("gconfig.logit_bias: -100 for every token; allowed: one token left to sample")


class TokenSampler:
    """Samples for a fixed list of rows; None is an idle row (its result is never read).

    `completions` are what the rows have sampled so far: later tokens are counted as they are sampled.
    """

    def __init__(
        self, rows: Sequence[SamplingParameters | None], device: torch.device, vocabulary: int,
        completions: Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
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
        self._adjustment = LogitAdjustment(used, device, vocabulary, completions or [()] * len(used))

    def sample(
        self, logits: torch.Tensor, uniforms: Sequence[float], forbidden: Sequence[tuple[int, int]] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [B, V]; `forbidden` are (row, token) that may not be drawn. Gives tokens [B] and log-probs [B].

        The log-prob is of the full distribution at the row's temperature, in float32 (float64 for float64 logits),
        whatever there is left to draw from; so for greedy rows too.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        temperature = self._temperature.to(logits.dtype)
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        allowed = logprobs
        if self._adjustment.is_any:
            allowed = self._adjustment.apply(logits, logprobs, temperature)
        if forbidden:
            rows, tokens = zip(*forbidden, strict=True)
            allowed = allowed.clone() if allowed is logprobs else allowed
            allowed[list(rows), list(tokens)] = float("-inf")
        if self.all_greedy:
            chosen = allowed.argmax(dim=-1)
        else:
            chosen = self._draw(allowed, uniforms)
            if self._any_greedy:
                chosen = torch.where(self._greedy, allowed.argmax(dim=-1), chosen)
        self._adjustment.count(chosen)
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


class LogitAdjustment:
    """Bias and frequency penalty of the rows that have one. Memory [P, V] for the counts of penalised rows."""

    def __init__(
        self, rows: Sequence[SamplingParameters], device: torch.device, vocabulary: int,
        completions: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        adjusted = [i for i, row in enumerate(rows) if row.logit_bias or row.frequency_penalty]
        self.is_any = bool(adjusted)
        self._rows = torch.tensor(adjusted, dtype=torch.long, device=device)
        biases = [(place, *pair) for place, i in enumerate(adjusted) for pair in rows[i].logit_bias]
        self._bias_rows = torch.tensor([row for row, _, _ in biases], dtype=torch.long, device=device)
        self._bias_tokens = torch.tensor([token for _, token, _ in biases], dtype=torch.long, device=device)
        values = [bias if bias > FORBIDDING_BIAS else float("-inf") for _, _, bias in biases]
        self._bias = torch.tensor(values, dtype=torch.float64, device=device)
        penalised = [(place, i) for place, i in enumerate(adjusted) if rows[i].frequency_penalty]
        self._penalised_places = torch.tensor([place for place, _ in penalised], dtype=torch.long, device=device)
        self._penalised = torch.tensor([i for _, i in penalised], dtype=torch.long, device=device)
        penalties = [rows[i].frequency_penalty for _, i in penalised]
        self._penalty = torch.tensor(penalties, dtype=torch.float64, device=device)[:, None]
        self._counts = torch.zeros(len(penalised), vocabulary if penalised else 0, device=device)
        for place, (_, i) in enumerate(penalised):
            if completions[i]:
                self._counts[place] = torch.bincount(torch.tensor(completions[i]), minlength=vocabulary).to(device)

    def apply(self, logits: torch.Tensor, logprobs: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """logits and logprobs [B, V], temperature [B, 1] -> log-probs [B, V] of what is drawn from."""
        changed = logits[self._rows]
        changed[self._bias_rows, self._bias_tokens] += self._bias.to(logits.dtype)
        if len(self._penalised):
            counts = self._counts[:, : logits.shape[1]].to(logits.dtype)
            changed[self._penalised_places] -= self._penalty.to(logits.dtype) * counts
        result = logprobs.clone()
        result[self._rows] = torch.log_softmax(changed / temperature[self._rows], dim=-1)
        return result

    def count(self, chosen: torch.Tensor) -> None:
        """The tokens [B] that were sampled."""
        if len(self._penalised):
            ones = torch.ones_like(self._counts[:, :1])
            self._counts.scatter_add_(1, chosen[self._penalised][:, None], ones)


def keep_likeliest(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """weights [B, V], top_k, top_p [B, 1]: zero but for the k likeliest, of these the fewest with a share of top_p."""
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[1], device=weights.device)[None]
    ordered = ordered.masked_fill(ranks >= top_k, 0)
    mass_before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(mass_before >= top_p * ordered.sum(dim=-1, keepdim=True), 0)
    return torch.zeros_like(weights).scatter_(1, index, ordered)
