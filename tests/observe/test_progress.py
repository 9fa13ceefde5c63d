"""The progress display: right mode, limited rate, never an exception."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from pekoe.pipeline.observe import progress as progress_module
from pekoe.pipeline.observe.progress import Progress, ProgressState, count, duration, line_of

STATE = ProgressState(
    step=3,
    total_steps=40,
    reward=0.625,
    train_tokens_per_second=12_345.0,
    rollout_tokens_per_second=987.0,
    staleness_mean=1.25,
    staleness_max=4,
    ready=5,
    running=12,
    eta_seconds=3723,
    waiting_for="groups",
)


def test_a_line_says_everything_that_is_known() -> None:
    assert line_of(STATE, 65) == (
        "step 3/40 | reward 0.625 | train tok/s 12.3k | rollout tok/s 987 | staleness 1.25 (max 4)"
        " | ready 5 | running 12 | elapsed 1:05 | left 1:02:03 | waiting for groups"
    )
    assert "accuracy" not in line_of(STATE, 0)
    assert "reward" not in line_of(ProgressState(0, 10), 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (float("nan"), "-"), (float("inf"), "-"), (0, "0:00"), (-3, "0:00"), (3599.7, "1:00:00")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (1000, "1.0k"), (2.5e6, "2.5M"), (3e9, "3.0G")])
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'fancy' is not allowed; allowed: auto, live, lines, off"):
        Progress("fancy")


def test_without_a_terminal_there_is_one_line_per_step_and_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    stream = io.StringIO()
    with Progress("auto", stream=stream, line_seconds=0.15) as progress:
        assert progress.mode == "lines"
        for _ in range(80):
            progress.update(ProgressState(1, 10))
            clock[0] += 0.005
        progress.update(ProgressState(2, 10))
        progress.update(ProgressState(2, 10))
    lines = stream.getvalue().splitlines()
    assert sum(line.startswith("step 1/10") for line in lines) == 3
    assert sum(line.startswith("step 2/10") for line in lines) == 1


def test_off_prints_nothing() -> None:
    stream = io.StringIO()
    with Progress("off", stream=stream) as progress:
        progress.update(STATE)
    assert stream.getvalue() == ""


class BrokenTerminal(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError("the terminal is gone")


@pytest.mark.parametrize("mode", ["lines", "live"])
def test_a_terminal_that_goes_away_turns_the_display_off(mode: str) -> None:
    progress = Progress(mode, stream=BrokenTerminal())
    progress.update(STATE)
    assert progress.mode == "off"
    progress.update(STATE)
    progress.close()


def test_updates_from_many_threads_stay_whole_lines() -> None:
    stream = io.StringIO()
    progress = Progress("lines", stream=stream, line_seconds=0)
    threads = [threading.Thread(target=lambda: [progress.update(STATE) for _ in range(100)] and None) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 400
    assert all(line.startswith("step 3/40 |") and line.endswith("waiting for groups") for line in lines)


ON_A_TERMINAL = """
from pekoe.pipeline.observe import progress as progress_module
from pekoe.pipeline.observe.progress import Progress, ProgressState
with Progress("auto", title="demo", live_seconds=0) as progress:
    assert progress.mode == "live", progress.mode
    for step in range(1, 4):
        progress.update(ProgressState(step, 3, reward=step / 4, waiting_for="weights"))
"""


def test_on_a_terminal_the_display_is_live() -> None:
    """A real pseudo-terminal: the display redraws in place and leaves the last state behind."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL],
        stdout=follower,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
    )
    _, errors = process.communicate(timeout=60)
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    assert process.returncode == 0, errors.decode()
    text = shown.decode()
    assert "step 3/3" in text
    assert "0.750" in text
    assert "\x1b[" in text, "nothing was redrawn"
