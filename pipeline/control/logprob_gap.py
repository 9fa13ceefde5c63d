"""How far log-probs of engines and trainer may lie apart, and what is said when they do.

Three comparisons, all at `gconfig.temperature`, of the full distribution: at the start of an attempt (`start_check.py`)
and after each update on fixed sequences, which end the run when an engine's mean gap is above the limit; and in each
step on the tokens that the trainer's own version has sampled, as figures with an alarm (`GapWatch`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pekoe.pipeline.config.run import RunConfig

if TYPE_CHECKING:
    from pekoe.pipeline.devices.device import Device

logger = logging.getLogger(__name__)

WIDE = 0.1
ALARM_STEPS = 20
"""An alarm that goes on is repeated after so many steps."""
SMALLEST_SHARE, SMALLEST_DRIFT = 0.005, 1e-3
"""Below these nothing is alarming, however small the limit."""


class EnginesDisagreeError(RuntimeError):
    """Engine and trainer, or what an engine samples and what it scores, give different log-probs for equal weights."""


class Gap(NamedTuple):
    """|log-prob(engine) - log-prob(trainer)| over tokens and engines."""

    mean: float = 0.0
    largest: float = 0.0
    share_wide: float = 0.0
    """Of tokens that are off by more than WIDE."""


@dataclass(frozen=True)
class GapLimit:
    """The largest mean |gap| that two right implementations show."""

    limit: float
    between: str = "engine and trainer"
    """Names both, with their dtypes and the device."""

    def judge(self, version: int, wanted: Sequence[float], found: Mapping[int, Sequence[float]]) -> Gap:
        """Over all ranks in `found`; raises EnginesDisagreeError naming the worst rank."""
        reference = np.asarray(wanted, dtype=np.float64)
        gaps = {rank: np.abs(np.asarray(values, dtype=np.float64) - reference) for rank, values in found.items()}
        if not gaps or not len(reference):
            return Gap()
        means = {rank: float(gap.mean()) for rank, gap in gaps.items()}
        worst = max(means, key=lambda rank: means[rank] if math.isfinite(means[rank]) else math.inf)
        if not means[worst] <= self.limit:
            raise EnginesDisagreeError(self.refusal(f"at version {version}", worst, gaps[worst]))
        everything = np.stack(list(gaps.values()))
        return Gap(float(everything.mean()), float(everything.max()), float((everything > WIDE).mean()))

    def refusal(self, when: str, rank: int, gap: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
        """The message of a gap above the limit."""
        return (
            f"{self.between} disagree {when} (rank {rank}): mean |log-prob gap| {gap.mean():.4g}, largest "
            f"{gap.max():.4g} > rollout.logprob_gap_limit {self.limit:.4g}. Either the weights did not arrive as they "
            "are (names, tied embeddings, a stale cache), or the two compute differently: compare rollout.dtype with "
            "actor.dtype, attention and rope settings of both; with actor.optimizer.lr=0 the gap must stay as it is "
            "(docs/rollout.md). An explicit rollout.logprob_gap_limit is taken instead of the one by device and dtype"
        )


def gap_limit(config: RunConfig, device: Device, engine: str, trainer: str) -> GapLimit:
    """`rollout.logprob_gap_limit`; by default that of the coarser of both dtypes, in proportion to 1 / temperature
    where that is below 1: a difference of logits counts as much more."""
    between = (
        f"{engine} engine (rollout.dtype {config.rollout.dtype}) and {trainer} trainer (actor.dtype "
        f"{config.actor.dtype}) on {device.kind}"
    )
    limit = config.rollout.logprob_gap_limit
    if limit is None:
        dtypes = {config.rollout.dtype, config.actor.dtype}
        limit = max(map(device.logprob_gap_limit, dtypes)) / min(config.gconfig.temperature, 1.0)
    return GapLimit(limit, between)


@dataclass
class GapWatch:
    """The gap on the tokens of a step that its own version has sampled: figures, and an alarm when they are bad.

    Alarming are a mean |gap| above the limit, too many tokens off by more than 0.1, and a mean gap whose signs do not
    cancel: rounding errors do, a wrong weight or scale does not.
    """

    limit: GapLimit
    stops: bool = False
    """`rollout.stop_at_gap`: the alarm is an error."""
    last_alarm: int | None = field(default=None)

    def look(self, version: int, stats: Mapping[str, float]) -> None:
        """`stats` of the step that made `version`; without tokens of its own version there is nothing to say."""
        reason = self.alarm(stats)
        if not reason:
            self.last_alarm = None
            return
        text = f"step {version}: {self.limit.between} drift apart on what was sampled: {reason}"
        if self.stops:
            raise EnginesDisagreeError(f"{text} (rollout.stop_at_gap)")
        if self.last_alarm is None or version - self.last_alarm >= ALARM_STEPS:
            self.last_alarm = version
            logger.error("%s; rollout.stop_at_gap=true would end the run here", text)

    def alarm(self, stats: Mapping[str, float]) -> str:
        """What is wrong, or nothing."""
        tokens = stats.get("engine_gap/tokens", 0.0)
        if not tokens:
            return ""
        mean, share = stats["engine_gap/mean"], stats["engine_gap/share_above_0.1"]
        drift, limit = stats["engine_gap/drift"], self.limit.limit
        most_share, most_drift = max(limit / 2, SMALLEST_SHARE), max(limit / 20, SMALLEST_DRIFT)
        # what few tokens show by chance: three standard errors
        most_share += 3 * math.sqrt(most_share * (1 - min(most_share, 1)) / tokens)
        most_drift += 3 * mean / math.sqrt(tokens)
        found = [
            f"{what} {value:.4g} > {most:.4g}"
            for what, value, most in (
                ("mean |gap|", mean, limit),
                ("share of tokens off by more than 0.1", share, most_share),
                ("|mean gap|", abs(drift), most_drift),
            )
            if not value <= most
        ]
        return f"{', '.join(found)} ({tokens:.0f} tokens)" if found else ""
