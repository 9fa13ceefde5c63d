"""What the head knows of a supervised run, as metrics and as the progress display."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pekoe.pipeline.messages import StepDone
from pekoe.pipeline.observe.progress import ProgressState

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.25
DROPPED = "rows/dropped_"
"""Figures of examples that do not train, one for each reason."""


@dataclass
class SupervisedReport:
    """Collects the figures of one step, then writes them once."""

    write_metrics: Callable[[int, Mapping[str, float]], None]
    show: Callable[[ProgressState], None]
    dropped: dict[str, int] = field(default_factory=dict)
    """Examples that did not train since the run began, by reason; goes into checkpoints."""
    figures: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    accuracy: float | None = None
    held_out_loss: float | None = None
    steps_done: int = 0
    began: float = field(default_factory=time.monotonic)
    step_began: float = field(default_factory=time.monotonic)
    shown: float = 0.0

    def begin(self) -> None:
        """Everybody is there: time counts from here."""
        self.began = self.step_began = time.monotonic()

    def snapshot(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"dropped": dict(self.dropped)}

    def step(self, version: int, done: StepDone) -> None:
        """Writes the step that made `version`."""
        now = time.monotonic()
        figures = dict(done.stats)
        tokens, sequences = figures.pop("rows/tokens"), figures.pop("rows/sequences")
        if sequences:
            figures["length/mean"] = tokens / sequences
        for name, count in figures.items():
            if name.startswith(DROPPED):
                reason = name.removeprefix(DROPPED)
                self.dropped[reason] = self.dropped.get(reason, 0) + int(count)
        figures["rows/dropped_total"] = float(sum(self.dropped.values()))
        figures["time/train"], figures["time/step"] = done.seconds, now - self.step_began
        figures["tokens_per_second/train"] = tokens / max(done.seconds, 1e-9)
        self.figures |= figures
        self.write_metrics(version, self.figures)
        self.last, self.figures = self.figures, {}
        self.step_began = now
        self.steps_done += 1
        self.shown = 0.0

    def saved(self, seconds: float, stage_seconds: float) -> None:
        """A checkpoint is complete; training stood still for `stage_seconds` of it."""
        self.figures["time/checkpoint"], self.figures["time/checkpoint_stage"] = seconds, stage_seconds

    def evaluated(self, version: int, sums: Mapping[str, float], seconds: float) -> None:
        """`eval/loss` is the mean over labels (sft) or pairs; nothing when no example could be used."""
        figures = {"eval/examples": sums.get("rows/examples", 0.0), "time/evaluation": seconds}
        figures["eval/dropped"] = sum(value for name, value in sums.items() if name.startswith(DROPPED))
        weight = sums.get("weight", 0.0)
        if weight:
            figures["eval/loss"] = sums["loss"] / weight
            for name in set(sums) - {"loss", "weight", "labels", "pairs"}:
                if not name.startswith("rows/"):
                    figures[f"eval/{name}"] = sums[name] / weight
        self.accuracy = figures.get("eval/accuracy", self.accuracy)
        self.held_out_loss = figures.get("eval/loss", self.held_out_loss)
        self.write_metrics(version, figures)
        self.step_began = time.monotonic()

    def summary(self) -> str:
        """For the end of the run: what did not train; empty when all did."""
        left_out = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in self.dropped.items() if count)
        return f"examples that were not trained on: {left_out}" if left_out else ""

    def progress(self, version: int, num_steps: int, waiting_for: str) -> None:
        """Shows where the run is, at most a few times a second."""
        now = time.monotonic()
        if now - self.shown < REFRESH_SECONDS:
            return
        self.shown = now
        per_step = (self.step_began - self.began) / self.steps_done if self.steps_done else None
        self.show(
            ProgressState(
                step=version,
                total_steps=num_steps,
                is_supervised=True,
                loss=self.last.get("train/loss"),
                held_out_loss=self.held_out_loss,
                accuracy=self.accuracy,
                train_tokens_per_second=self.last.get("tokens_per_second/train", 0.0),
                eta_seconds=None if per_step is None else per_step * (num_steps - version),
                waiting_for=waiting_for,
            )
        )
