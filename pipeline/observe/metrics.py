"""Metrics of a run: one JSON line per write, and the same numbers as TensorBoard events.

`RUN/metrics/metrics.jsonl` is the truth: `{"step", "time", "attempt", name: value, …}`, whole lines appended, at most
the last one torn by a crash. Names are `area/what` (`reward/mean`, `staleness/max`, `train/loss`, `eval/accuracy`,
`time/step`, `tokens_per_second/rollout`, …). A value that is not finite is kept as the text `nan`, `inf` or `-inf`, so
that every line is standard JSON; a figure that does not exist is left out, never written as NaN.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

RESERVED = ("step", "time", "attempt")


@dataclass(frozen=True)
class MetricsLine:
    """One write."""

    step: int
    """Version of the weights that the figures speak of: completed training steps."""
    time: float
    """Seconds since 1970."""
    attempt: int
    values: dict[str, float]


def metrics_path(run: RunDirectory) -> Path:
    return run.metrics / "metrics.jsonl"


def event_files(run: RunDirectory) -> list[Path]:
    """TensorBoard's files."""
    return sorted(run.metrics.glob("events.out.tfevents.*"))


class MetricsWriter:
    """Appends figures; owned by the head, safe to call from any thread.

    Lines reach the operating system before `write` returns; TensorBoard events within `flush_seconds` or at `close`.
    Raises ValueError for reserved or non-numeric values, OSError when the disk refuses.
    """

    def __init__(
        self, run: RunDirectory, attempt: int, *, tensorboard: bool = True, flush_seconds: float = 5.0
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._tensorboard = tensorboard
        self._flush_seconds = flush_seconds
        self._flushed = time.monotonic()
        self._lock = threading.Lock()
        self._descriptor = -1
        self._events: EventWriter | None = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, float | None], wall: float | None = None) -> None:
        """Appends the figures of a step; None is left out. Several writes of one step add up, later ones win."""
        line = MetricsLine(step, time.time() if wall is None else wall, self._attempt, _numbers(values))
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = _open_for_append(metrics_path(self._run))
            _write_all(self._descriptor, _encode(line))
            if self._tensorboard:
                if self._events is None:
                    self._events = EventWriter(self._run.metrics)
                self._events.add(line)
                if time.monotonic() - self._flushed > self._flush_seconds:
                    self._events.flush()
                    self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes everything; a later write opens again."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
            if self._events is not None:
                self._events.close()
                self._events = None

    def truncate_after(self, step: int) -> int:
        """For resume at `step`: takes later lines out of the files and puts them aside; gives how many there were.

        TensorBoard's files cannot be cut, so they are put aside whole and made again from the lines that stay.
        """
        self.close()
        with self._lock:
            lines = read_metrics(self._run)
            later = [line for line in lines if line.step > step]
            if not later:
                return 0
            reason = f"the run went on from step {step}"
            abandoned = metrics_path(self._run).with_name(f"after-step-{step}.jsonl")
            files.write_bytes(abandoned, b"".join(_encode(line) for line in later))
            self._run.put_aside(abandoned, reason)
            stay = [line for line in lines if line.step <= step]
            files.write_bytes(metrics_path(self._run), b"".join(_encode(line) for line in stay))
            for path in event_files(self._run):
                self._run.put_aside(path, reason)
            if self._tensorboard and stay:
                self._events = EventWriter(self._run.metrics)
                for line in stay:
                    self._events.add(line)
                self._events.flush()
            return len(later)


class EventWriter:
    """TensorBoard scalars by TensorBoard's own writer, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer  # type: ignore[import-untyped]

        self._writer = Writer(str(folder))

    def add(self, line: MetricsLine) -> None:
        for name, value in line.values.items():
            self._writer.add_scalar(name, value, line.step, wall_time=line.time)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def read_metrics(run: RunDirectory) -> list[MetricsLine]:
    """All whole lines in their order; a torn or foreign line is skipped, an absent file gives none."""
    try:
        data = metrics_path(run).read_bytes()
    except FileNotFoundError:
        return []
    lines = (_decode(text) for text in data.split(b"\n"))
    return [line for line in lines if line is not None]


def series(lines: list[MetricsLine], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one figure, steps rising; of several writes for a step the last one counts."""
    found = {line.step: line.values[name] for line in lines if name in line.values}
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        if name in RESERVED:
            raise ValueError(f"metrics: the name {name!r} is reserved ({', '.join(RESERVED)})")
        if value is None:
            continue
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metrics: {name} = {value!r} is not a number") from error
    return numbers


def _encode(line: MetricsLine) -> bytes:
    values = {name: value if math.isfinite(value) else str(value) for name, value in line.values.items()}
    record = {"step": line.step, "time": round(line.time, 3), "attempt": line.attempt, **values}
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def _decode(text: bytes) -> MetricsLine | None:
    try:
        record = json.loads(text)
        step, wall, attempt = (record.pop(name) for name in RESERVED)
        return MetricsLine(int(step), float(wall), int(attempt), {name: float(value) for name, value in record.items()})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _open_for_append(path: Path) -> int:
    """Opens the file at its end; a line torn by a crash is ended first, so that it spoils no other one."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
