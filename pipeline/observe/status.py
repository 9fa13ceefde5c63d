"""`pekoe status RUN`: what every rank does and since when, from the files of the run alone."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from pekoe.pipeline.observe.heartbeat_files import HeartbeatFile, read_heartbeats
from pekoe.pipeline.observe.metrics import read_metrics, series
from pekoe.pipeline.observe.progress import duration
from pekoe.pipeline.run_directory import RunDirectory

SILENT_SECONDS = 15.0
"""A rank that said nothing for this long is called silent."""
WIDTH = 140
SHOWN_FIGURES = (
    "reward/mean",
    "eval/accuracy",
    "staleness/mean",
    "staleness/max",
    "train/loss",
    "train/logprob_gap",
    "time/step",
)


def status(run_path: Path | str, *, now: float | None = None) -> str:
    """A text for people; raises ValueError when the path is no run directory."""
    run = RunDirectory(Path(run_path))
    if not (run.run_json.exists() or run.config.exists() or run.heartbeats.is_dir()):
        raise ValueError(f"{run_path}: not a run directory (no run.json, config.yaml or heartbeats/)")
    now = time.time() if now is None else now
    parts = [
        f"run {run.path}",
        ranks_text(read_heartbeats(run), now),
        figures_text(run),
        files_text(run),
        errors_text(run),
    ]
    return "\n".join(part for part in parts if part)


def state_of(item: HeartbeatFile, now: float) -> str:
    """`alive`, `silent` (no heartbeat for long), or `ended` for a rank that ended in order."""
    if item.heartbeat.phase == "ended":
        return "ended"
    return "alive" if item.age_seconds(now) <= SILENT_SECONDS else "silent"


def ranks_text(heartbeats: list[HeartbeatFile], now: float) -> str:
    """The table of ranks."""
    if not heartbeats:
        return "no heartbeats yet"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "role", "host", "pid", "state", "heard", "phase", "since", "version", "gauges"):
        table.add_column(name, justify="right" if name in ("rank", "pid", "heard", "since", "version") else "left")
    for item in heartbeats:
        beat, age = item.heartbeat, item.age_seconds(now)
        gauges = " ".join(f"{name}={value:.6g}" for name, value in sorted(beat.gauges.items()))
        table.add_row(
            str(beat.rank),
            beat.role,
            beat.host,
            str(beat.pid),
            state_of(item, now),
            f"{age:.0f} s ago",
            beat.phase,
            duration(beat.phase_seconds + age),
            str(beat.version),
            gauges,
        )
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    silent = [item.heartbeat.rank for item in heartbeats if state_of(item, now) == "silent"]
    head = f"attempt {heartbeats[0].attempt}\n"
    note = f"\nsilent for over {SILENT_SECONDS:.0f} s: rank {', '.join(map(str, silent))}" if silent else ""
    return head + text.rstrip() + note


def figures_text(run: RunDirectory) -> str:
    """The newest value of the figures that matter."""
    lines = read_metrics(run)
    if not lines:
        return "no training step yet"
    shown = []
    for name in SHOWN_FIGURES:
        steps, values = series(lines, name)
        if steps:
            at = "" if steps[-1] == lines[-1].step else f" (step {steps[-1]})"
            shown.append(f"{name} {values[-1]:.4g}{at}")
    return f"last step {max(line.step for line in lines)}: " + ", ".join(shown)


def files_text(run: RunDirectory) -> str:
    """What lies in the run directory."""
    shards = list(run.shards.glob("*/*.h5"))
    checkpoints = sorted(run.checkpoints.glob("step-*"), key=lambda path: (len(path.name), path.name))
    aside = [path for path in run.set_aside.glob("*") if not path.name.endswith(".reason.json")]
    newest = f" (newest {checkpoints[-1].name})" if checkpoints else ""
    return f"{len(shards)} shards, {len(checkpoints)} checkpoints{newest}, {len(aside)} files set aside"


def errors_text(run: RunDirectory) -> str:
    """One sentence per error record."""
    sentences = []
    for path in sorted(run.errors.glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
            who = f"rank {record.get('rank', '?')} ({record.get('role', '?')}, {record.get('host', '?')}) in phase "
            who = "" if record.get("rank") == -1 else f"{who}{record.get('phase', '?')!r}: "
            sentences.append(
                f"error in attempt {record.get('attempt', '?')}: {who}{record.get('error', 'unknown')}\n  see {path}"
            )
        except (OSError, ValueError, AttributeError) as error:
            sentences.append(f"error record {path} cannot be read: {error}")
    return "\n".join(sentences)
