"""What a training step says of itself: sums over tokens, sequences and updates become means.

Every figure is a ratio of sums over the trainer ranks (or a maximum over them), so that it does not depend on how the
batch was cut; one whose denominator is 0 is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pekoe.pipeline.records import PackedBatch

FRESH = "fresh_"
"""Statistics of trainer against engine on tokens that the step's own version has sampled: only while its weights are
those of the version."""
AGES = 8
"""Ages of tokens that have a share of their own; older ones share one."""
COUNTS = ("tokens", "sequences")
PER_UPDATE = ("loss", "lr", "grad_norm")
ROUNDING = 1e-12
"""A variance below this share of the mean square is none."""


class Over(Protocol):
    """Reductions over the trainer ranks."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def max(self, tensor: torch.Tensor) -> torch.Tensor: ...


@dataclass
class UpdateSums:
    """Adds up what the updates of one model in one step report."""

    sums: dict[str, float] = field(default_factory=dict)
    num_updates: int = 0

    def add(self, stats: dict[str, float], *, is_fresh: bool = False) -> None:
        """Sums add up, maxima are kept. `is_fresh`: the weights are still those of the step's version."""
        self.num_updates += 1
        for name, value in stats.items():
            if name.startswith(FRESH) and not is_fresh:
                continue
            is_maximum = name.endswith("_max") and name in self.sums
            self.sums[name] = max(self.sums[name], value) if is_maximum else self.sums.get(name, 0.0) + value

    def means(self, area: str, num_epochs: int = 1) -> dict[str, float]:
        """`area/…`: means over active tokens; norms, rates and losses over updates; counts of one epoch."""
        tokens = self.sums.get("tokens", 0.0)
        found = {f"{area}/updates": self.num_updates - self.sums.get("update_skipped", 0.0)}
        for name, value in self.sums.items():
            if name.startswith(FRESH):
                continue
            if name in COUNTS:
                found[f"{area}/{name}"] = value / num_epochs
            elif name in PER_UPDATE:
                found[f"{area}/{name}"] = value / self.num_updates
            elif name == "update_skipped":
                found[f"{area}/{name}"] = value
            elif tokens:
                found[f"{area}/{name}"] = value if name.endswith("_max") else value / tokens
        return found

    def engine_gap(self) -> dict[str, float]:
        """`engine_gap/…`: the engines' log-probs against the trainer's by the same weights; nothing without such
        tokens."""
        sums = self.sums
        tokens = sums.get("fresh_tokens", 0.0)
        if not tokens:
            return {}
        return {
            "engine_gap/tokens": tokens,
            "engine_gap/mean": sums["fresh_gap"] / tokens,
            "engine_gap/drift": sums["fresh_drift"] / tokens,
            "engine_gap/share_above_0.1": sums["fresh_wide"] / tokens,
            "engine_gap/max": sums["fresh_gap_max"],
        }


def batch_statistics(batches: Sequence[PackedBatch], version: int, over: Over) -> dict[str, float]:
    """Of what the step at `version` trains on, before any update; collective over the trainer ranks.

    `staleness/share_N`: tokens of age N; `train/kl_ref` and `train/kl_teacher`: mean log-ratio of the policy (proximal
    where there is one, else behaviour) to another model; `critic/…`: values against returns.
    """
    parts = [_sums_of(batch, version) for batch in batches]
    local = np.sum(parts, axis=0) if parts else np.zeros(NUM_SUMS)
    sums = over.sum(torch.from_numpy(local)).numpy()
    ages, tokens = sums[: AGES + 1], sums[: AGES + 1].sum()
    found = {}
    if tokens:
        names = [*(f"staleness/share_{age}" for age in range(AGES)), f"staleness/share_{AGES}_up"]
        found = {name: float(count / tokens) for name, count in zip(names, ages, strict=True)}
    pairs = sums[AGES + 1 : AGES + 5].reshape(2, 2)
    for name, (count, total) in zip(("train/kl_ref", "train/kl_teacher"), pairs, strict=True):
        if count:
            found[name] = float(total / count)
    return found | _value_figures(sums[AGES + 5 :])


NUM_SUMS = AGES + 1 + 4 + 6


def _sums_of(batch: PackedBatch, version: int) -> npt.NDArray[np.float64]:
    """[NUM_SUMS]: tokens by age; (tokens, log-ratio) to the reference, to the teacher; of values and returns."""
    active = batch.loss_mask.astype(bool)
    age = np.clip(version - batch.versions[active], 0, AGES)
    policy = batch.extra.get("prox_logprobs", batch.logprobs)[active].astype(np.float64)
    ratios = []
    for name in ("ref_logprobs", "teacher_logprobs"):
        if name in batch.extra:
            ratios += [float(active.sum()), float((policy - batch.extra[name][active]).sum())]
        else:
            ratios += [0.0, 0.0]
    value_sums = np.zeros(6)
    if "values" in batch.extra and "returns" in batch.extra:
        values = batch.extra["values"][active].astype(np.float64)
        returns = batch.extra["returns"][active].astype(np.float64)
        error = returns - values
        value_sums[:] = (
            len(values), values.sum(), returns.sum(), np.square(returns).sum(), error.sum(), np.square(error).sum()
        )  # fmt: skip
    return np.concatenate([np.bincount(age, minlength=AGES + 1), ratios, value_sums])


def _value_figures(sums: npt.NDArray[np.float64]) -> dict[str, float]:
    """Means of values and returns, and `1 - Var(R - V) / Var(R)` where returns vary."""
    count, values, returns, squares, error, error_squares = (float(x) for x in sums)
    if not count:
        return {}
    found = {"critic/value": values / count, "critic/return": returns / count}
    variance = squares / count - (returns / count) ** 2
    if variance > ROUNDING * squares / count:
        unexplained = error_squares / count - (error / count) ** 2
        found["critic/explained_variance"] = 1 - unexplained / variance
    return found
