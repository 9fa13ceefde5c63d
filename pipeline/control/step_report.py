"""What the head knows of a step, as metrics and as the progress display."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pekoe.pipeline.control.evaluation import Evaluation
from pekoe.pipeline.control.group_table import row_staleness
from pekoe.pipeline.control.logprob_gap import Gap, GapWatch
from pekoe.pipeline.control.step import StepRows
from pekoe.pipeline.observe.progress import ProgressState

if TYPE_CHECKING:
    from pekoe.pipeline.control.controller import Controller
    from pekoe.pipeline.control.dispatcher import Losses

REFRESH_SECONDS = 0.25
RATE_STEPS = 8
"""Steps over which the rate of rollout is taken."""


@dataclass
class StepReport:
    """Collects the figures of one step from the controller, then writes them once."""

    write_metrics: Callable[[int, Mapping[str, float]], None]
    show: Callable[[ProgressState], None]
    wait_seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    accuracy: float | None = None
    last: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    step_began: float = field(default_factory=time.monotonic)
    sampled: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_STEPS + 1))
    """(when, tokens published until then) at the last step boundaries: groups arrive in bursts."""
    steps_done: int = 0
    shown: float = 0.0
    gap_watch: GapWatch | None = None

    def begin(self) -> None:
        """Everybody is there: time counts from here."""
        self.began = self.step_began = time.monotonic()
        self.sampled.append((self.began, self.sampled[-1][1] if self.sampled else 0))

    def trained(self, rows: StepRows, stats: Mapping[str, float], losses: Losses, seconds: float) -> None:
        version = int(stats.get("version", 0)) - 1
        if self.gap_watch is not None:
            self.gap_watch.look(version + 1, stats)
        self.figures = {
            **{name: value for name, value in stats.items() if name != "version"},
            **row_figures(rows, version),
            "groups/consumed": float(len(rows.groups)),
            "groups/filtered": float(len(losses.filtered)),
            "groups/skipped": float(len(losses.skipped)),
            "time/train": seconds,
            "time/wait": self.wait_seconds,
            "tokens_per_second/train": float(sum(row.length for _, row in rows.rows)) / max(seconds, 1e-9),
        }

    def updated(self, gap: Gap, seconds: float, stood_still: float) -> None:
        self.figures["weights/logprob_gap_mean"], self.figures["weights/logprob_gap_max"] = gap.mean, gap.largest
        self.figures["weights/logprob_gap_share_above_0.1"] = gap.share_wide
        self.figures["time/update"] = seconds
        self.figures["time/engines_paused"] = stood_still

    def saved(self, seconds: float, stage_seconds: float) -> None:
        """A checkpoint is complete; training stood still for `stage_seconds` of it."""
        self.figures["time/checkpoint"], self.figures["time/checkpoint_stage"] = seconds, stage_seconds

    def step(self, controller: Controller) -> None:
        """Writes the step that made `controller.version`."""
        now = time.monotonic()
        dispatcher = controller.parts.dispatcher
        seconds = now - self.step_began
        self.sampled.append((now, dispatcher.tokens_sampled))
        (then, tokens), (_, tokens_now) = self.sampled[0], self.sampled[-1]
        self.figures["time/step"] = seconds
        self.figures["tokens_per_second/rollout"] = (tokens_now - tokens) / max(now - then, 1e-9)
        self.figures["queue/ready"] = float(dispatcher.table.num_ready)
        self.figures["queue/running"] = float(dispatcher.admission.running)
        if controller.state.saves.failures:
            self.figures["checkpoint/failures"] = float(controller.state.saves.failures)
        if controller.disk.count:
            self.figures["disk/refusals"] = float(controller.disk.count)
        roster = controller.parts.weights.roster
        if left_out := len(roster.engines) - len(roster.available()):
            self.figures["engines/left_out"] = float(left_out)
        for name, count in dispatcher.counts.items():
            self.figures[f"groups_total/{name}"] = float(count)
        self.write_metrics(controller.version, self.figures)
        self.last, self.figures = self.figures, {}
        self.step_began = now
        self.steps_done += 1
        self.shown = 0.0
        self.progress(controller)

    def evaluated(self, evaluation: Evaluation) -> None:
        metrics = evaluation.metrics()
        self.accuracy = metrics.get("eval/accuracy", self.accuracy)
        self.write_metrics(evaluation.name, metrics)
        if self.steps_done == 0:
            self.begin()

    def progress(self, controller: Controller) -> None:
        """Shows where the run is, at most a few times a second."""
        now = time.monotonic()
        if now - self.shown < REFRESH_SECONDS:
            return
        self.shown = now
        dispatcher = controller.parts.dispatcher
        remaining = controller.num_steps - controller.version
        per_step = (self.step_began - self.began) / self.steps_done if self.steps_done else None
        self.show(
            ProgressState(
                step=controller.version,
                total_steps=controller.num_steps,
                reward=self.last.get("reward/mean"),
                accuracy=self.accuracy,
                train_tokens_per_second=self.last.get("tokens_per_second/train", 0.0),
                rollout_tokens_per_second=self.last.get("tokens_per_second/rollout", 0.0),
                staleness_mean=self.last.get("staleness/mean", 0.0),
                staleness_max=self.last.get("staleness/max", 0.0),
                ready=dispatcher.table.num_ready,
                running=dispatcher.admission.running,
                eta_seconds=None if per_step is None else per_step * remaining,
                waiting_for=controller.pump.reason,
            )
        )


def row_figures(batch: StepRows, version: int) -> dict[str, float]:
    """Of all rows of the batch, masked ones too, in the step at `version`; nothing without rows.

    Rewards are as the reward function gave them. `staleness/…` is that of the oldest token of each row, its spread
    the versions between the oldest and the newest one.
    """
    if not batch.rows:
        return {}
    rows = [row for _, row in batch.rows]
    rewards = np.array([row.reward for row in rows])
    lengths = np.array([row.num_active for row in rows])
    staleness = np.array(row_staleness(batch.groups, version))
    spread = np.array([row.max_version - row.min_version for row in rows])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "truncated/share": float(np.mean([row.truncated for row in rows])),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        "staleness/spread_mean": float(spread.mean()),
        "staleness/spread_max": float(spread.max()),
    }
