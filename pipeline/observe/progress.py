"""What people see while a run goes on: a live display on a terminal, else a line now and then."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

MODES = ("auto", "live", "lines", "off")
LIVE_SECONDS = 0.25
LINE_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProgressState:
    """One look at a run; None = not known yet."""

    step: int
    """Completed training steps."""
    total_steps: int
    reward: float | None = None
    """Mean reward of the last step's batch."""
    accuracy: float | None = None
    """Of the last evaluation."""
    train_tokens_per_second: float = 0.0
    rollout_tokens_per_second: float = 0.0
    staleness_mean: float = 0.0
    """In training steps, over the tokens of the last batch."""
    staleness_max: float = 0.0
    ready: int = 0
    """Groups that wait to be trained on."""
    running: int = 0
    """Groups admitted and not finished."""
    eta_seconds: float | None = None
    waiting_for: str = ""
    """What the head waits for right now."""
    is_supervised: bool = False
    """Nothing is sampled: figures of rollout mean nothing."""
    loss: float | None = None
    """Of the last step, where that tells how far a run is."""
    held_out_loss: float | None = None


class _Terminal(Console):
    """A console that raises when its reader went away; rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError("the reader of the terminal went away")


class Progress:
    """Shows states. `update` may be called from any thread as often as one likes: it limits its own rate and never
    raises; after a failure of the terminal it is off for good.

    Mode `auto` is `live` on an interactive terminal and `lines` elsewhere. A line is printed for each new step, and
    every `line_seconds` between steps.
    """

    def __init__(
        self,
        mode: str = "auto",
        *,
        title: str = "",
        stream: TextIO | None = None,
        line_seconds: float = LINE_SECONDS,
        live_seconds: float = LIVE_SECONDS,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"stats_logger.progress: {mode!r} is not allowed; allowed: {', '.join(MODES)}")
        self._console = _Terminal(file=stream or sys.stdout, force_terminal=True if mode == "live" else None)
        if mode == "auto":
            mode = "live" if self._console.is_terminal and not self._console.is_dumb_terminal else "lines"
        self.mode = mode
        self._title = title
        self._seconds = live_seconds if mode == "live" else line_seconds
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._began = time.monotonic()
        self._shown_at = float("-inf")
        self._shown_step = -1
        self._state: ProgressState | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, state: ProgressState) -> None:
        """Takes the newest state; shows it when it is time to."""
        if self.mode == "off":
            return
        with self._lock:
            self._state = state
            now = time.monotonic()
            new_step = self.mode == "lines" and state.step != self._shown_step
            if new_step or now - self._shown_at >= self._seconds:
                self._shown_at, self._shown_step = now, state.step
                self._show(state)

    def close(self) -> None:
        """Shows the last state and gives the terminal back."""
        with self._lock:
            if self.mode == "live" and self._state is not None:
                self._show(self._state)
            if self._live is not None:
                live, self._live = self._live, None
                try:
                    live.stop()
                except Exception as error:
                    logger.warning("the progress display could not be closed: %s", error)
            self.mode = "off"

    def _show(self, state: ProgressState) -> None:
        try:
            elapsed = time.monotonic() - self._began
            if self.mode == "lines":
                self._console.file.write(line_of(state, elapsed) + "\n")
                self._console.file.flush()
                return
            if self._live is None:
                self._live = Live(
                    console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
                )
                self._live.start()
            self._live.update(panel_of(state, elapsed, self._title), refresh=True)
        except Exception as error:
            self.mode = "off"
            logger.warning("the progress display is off: %s", error)


def duration(seconds: float | None) -> str:
    """`1:02:03`, `2:03`, or `-` when it is not known."""
    if seconds is None or not seconds < float("inf"):
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(number: float) -> str:
    """A number for people: `987`, `12.3k`, `4.6M`."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(number) < limit:
            return f"{number / divisor:.{0 if divisor == 1 else 1}f}{unit}"
    return f"{number / 1e9:.1f}G"


def figures_of(state: ProgressState) -> list[tuple[str, str]]:
    """(name, text) of each figure, in the order shown."""
    shown = (
        ("reward", state.reward), ("loss", state.loss), ("held-out loss", state.held_out_loss),
        ("accuracy", state.accuracy),
    )  # fmt: skip
    figures = [(name, f"{value:.3f}") for name, value in shown if value is not None]
    if state.is_supervised:
        return [*figures, ("train tok/s", count(state.train_tokens_per_second))]
    figures += [
        ("train tok/s", count(state.train_tokens_per_second)),
        ("rollout tok/s", count(state.rollout_tokens_per_second)),
        ("staleness", f"{state.staleness_mean:.2f} (max {state.staleness_max:.0f})"),
        ("ready", str(state.ready)),
        ("running", str(state.running)),
    ]
    return figures


def line_of(state: ProgressState, elapsed_seconds: float) -> str:
    """A state as one line of text."""
    parts = [f"step {state.step}/{state.total_steps}", *(f"{name} {text}" for name, text in figures_of(state))]
    parts += [f"elapsed {duration(elapsed_seconds)}", f"left {duration(state.eta_seconds)}"]
    if state.waiting_for:
        parts.append(f"waiting for {state.waiting_for}")
    return " | ".join(parts)


def panel_of(state: ProgressState, elapsed_seconds: float, title: str) -> RenderableType:
    """A state for the live display."""
    head = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, state.total_steps), completed=state.step, width=30)
    times = f"{duration(elapsed_seconds)} elapsed, {duration(state.eta_seconds)} left"
    head.add_row(Text(title or "pekoe", style="bold"), bar, f"step {state.step}/{state.total_steps}", times)
    figures = Table.grid(padding=(0, 2))
    names, texts = zip(*figures_of(state), strict=True)
    figures.add_row(*(Text(name, style="dim") for name in names))
    figures.add_row(*texts)
    wait = Text(
        f"waiting for {state.waiting_for}" if state.waiting_for else "", style="dim", overflow="ellipsis", no_wrap=True
    )
    return Group(head, figures, wait)
