"""What a training step says of itself: sums over tokens, sequences and updates become means.

Every figure is a ratio of sums over the trainer ranks (or a maximum over them), so that it does not depend on how the
batch was cut; one whose denominator is 0 is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
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


def staleness_shares(batches: Sequence[PackedBatch], version: int, over: Over) -> dict[str, float]:
    """`staleness/share_N`: the share of tokens of age N that the step at `version` trains on; collective."""
    counts = np.zeros(AGES + 1)
    for batch in batches:
        ages = version - batch.versions[batch.loss_mask.astype(bool)]
        counts += np.bincount(np.clip(ages, 0, AGES), minlength=AGES + 1)
    counts = over.sum(torch.from_numpy(counts)).numpy()
    names = [*(f"staleness/share_{age}" for age in range(AGES)), f"staleness/share_{AGES}_up"]
    tokens = counts.sum()
    return {name: float(count / tokens) for name, count in zip(names, counts, strict=True)} if tokens else {}


def reward_figures(sums: dict[str, float]) -> dict[str, float]:
    """Rewards and advantages of the rows that train, from the sums of `algorithm/reward_statistics.py`."""
    sequences, tokens = sums.get("reward_sequences", 0.0), sums.get("advantage_tokens", 0.0)
    found = {}
    for name, total, count in (
        ("reward/raw", "reward_raw", sequences),
        ("reward/shaped", "reward_shaped", sequences),
        ("reward/overlong_penalty", "overlong_penalty", sequences),
        ("reward/turns", "turn_reward_sum", sequences),
        ("reward/kl", "kl_reward_sum", tokens),
        ("advantage/mean", "advantage_sum", tokens),
        ("advantage/abs", "advantage_abs", tokens),
        ("critic/return", "return_sum", tokens),
        ("groups/zero_variance", "zero_variance_groups", sums.get("reward_groups", 0.0)),
    ):
        if total in sums and count:
            found[name] = sums[total] / count
    if tokens:
        found["advantage/abs_max"] = sums["advantage_abs_max"]
        found["advantage/std"] = math.sqrt(variance(sums["advantage_sum"], sums["advantage_squares"], tokens))
    if sequences:
        found["reward/shaped_std"] = math.sqrt(
            variance(sums["reward_shaped"], sums["reward_shaped_squares"], sequences)
        )
    if "return_error" not in sums:
        found.pop("critic/return", None)
    elif tokens:
        found["critic/value"] = (sums["return_sum"] - sums["return_error"]) / tokens
        of_returns = variance(sums["return_sum"], sums["return_squares"], tokens)
        if of_returns:
            unexplained = variance(sums["return_error"], sums["return_error_squares"], tokens)
            found["critic/explained_variance"] = 1 - unexplained / of_returns
    return found


def variance(total: float, squares: float, count: float) -> float:
    """From sums; 0 where only rounding is left."""
    found = squares / count - (total / count) ** 2
    return found if found > ROUNDING * squares / count else 0.0
