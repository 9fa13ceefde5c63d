"""Metrics of a run: one JSON line per write, and the same numbers as TensorBoard events.

`RUN/metrics/metrics.jsonl` is the truth: `{"step", "time", "attempt", name: value, …}`, whole lines appended, at most
the last one torn by a crash. Names are `area/what` (`reward/mean`, `staleness/max`, `train/loss`, `eval/accuracy`,
`time/step`, `tokens_per_second/rollout`, …). A value that is not finite is kept as the text `nan`, `inf` or `-inf`, so
that every line is standard JSON; a figure that does not exist is left out, never written as NaN.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.observe.append_file import AppendFile
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

    Lines and events reach the operating system before `write` returns. A full disk ends nothing: they wait in memory
    (see `AppendFile`). Raises ValueError for reserved or non-numeric values, OSError when the disk refuses otherwise.
    """

    def __init__(self, run: RunDirectory, attempt: int, *, tensorboard: bool = True) -> None:
        self._run = run
        self._attempt = attempt
        self._tensorboard = tensorboard
        self._lock = threading.Lock()
        self._lines: AppendFile | None = None
        self._events: EventWriter | None = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, float | None], wall: float | None = None) -> None:
        """Appends the figures of a step; None is left out. Several writes of one step add up, later ones win."""
        line = MetricsLine(step, time.time() if wall is None else wall, self._attempt, _numbers(values))
        with self._lock:
            if self._lines is None:
                self._lines = AppendFile(metrics_path(self._run), line_end=b"\n")
            self._lines.append(_encode(line))
            if self._tensorboard:
                if self._events is None:
                    self._events = EventWriter(self._run.metrics)
                self._events.add(line)

    def close(self) -> None:
        """Writes what still waits, if there is room; a later write opens again."""
        with self._lock:
            if self._lines is not None:
                self._lines.close()
                self._lines = None
            if self._events is not None:
                self._events.close()
                self._events = None

    def truncate_after(self, step: int) -> int:
        """For resume at `step`: takes later lines out of the files and puts them aside; gives how many there were.

        TensorBoard's files cannot be cut, so they are put aside whole and made again from the lines that stay. The
        lines are cut last: after a crash on the way all of it is done again.
        """
        self.close()
        with self._lock:
            lines = read_metrics(self._run)
            later = [line for line in lines if line.step > step]
            if not later:
                return 0
            reason = f"the run went on from step {step}"
            stay = [line for line in lines if line.step <= step]
            for path in event_files(self._run):
                self._run.put_aside(path, reason)
            if self._tensorboard and stay:
                self._events = EventWriter(self._run.metrics)
                for line in stay:
                    self._events.add(line)
            abandoned = metrics_path(self._run).with_name(f"after-step-{step}.jsonl")
            files.write_bytes(abandoned, b"".join(_encode(line) for line in later))
            self._run.put_aside(abandoned, reason)
            files.write_bytes(metrics_path(self._run), b"".join(_encode(line) for line in stay))
            return len(later)


class EventWriter:
    """TensorBoard scalars, in a new file of its format. Its own writer is not used: that one has a thread of its own,
    in which an error would end the run."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        opening = Event(wall_time=now, file_version="brain.Event:2").SerializeToString()
        self._file = AppendFile(folder / name, _as_record(opening))

    def add(self, line: MetricsLine) -> None:
        self._file.append(b"".join(_scalar(name, value, line) for name, value in line.values.items()))

    def close(self) -> None:
        self._file.close()


def _scalar(name: str, value: float, line: MetricsLine) -> bytes:
    """One figure as TensorBoard's record."""
    import numpy as np
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.plugins.scalar.metadata import create_summary_metadata  # type: ignore[import-untyped]
    from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-untyped]

    tensor = make_tensor_proto(np.float32(value))
    point = Summary.Value(tag=name, tensor=tensor, metadata=create_summary_metadata(None, None))
    event = Event(wall_time=line.time, step=line.step, summary=Summary(value=[point]))
    return _as_record(event.SerializeToString())


def _as_record(data: bytes) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    buffer = io.BytesIO()
    RecordWriter(buffer).write(data)
    return buffer.getvalue()


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
