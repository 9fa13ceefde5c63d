"""`pekoe status RUN`: what every rank does and since when, who waits for whom, from the files of the run alone."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from pekoe.pipeline.observe.heartbeat_files import HeartbeatFile, read_heartbeats
from pekoe.pipeline.observe.metrics import read_metrics, series
from pekoe.pipeline.observe.progress import duration
from pekoe.pipeline.observe.waits import ThreadNow, ranks_in_words, stalled_text, state_of, threads_of, waits_text
from pekoe.pipeline.run_directory import RunDirectory

WIDTH = 140
MAX_ROWS = 64
"""Ranks that are shown one by one; of larger worlds only the head and those in trouble."""
MAX_COLUMNS = 6
"""Ranks whose gauges stand side by side; of more the least, the mean and the most."""
MAX_ERRORS = 5
"""Error records that are shown: the newest."""
SHOWN_FIGURES = (
    "reward/mean",
    "eval/accuracy",
    "eval/loss",
    "staleness/mean",
    "staleness/max",
    "train/loss",
    "train/logprob_gap",
    "time/step",
)


def status(run_path: Path | str, *, now: float | None = None, over: bool = False) -> str:
    """A text for people; raises ValueError when the path is no run directory. `over`: nobody drives the run any more,
    however young its heartbeats are."""
    run = RunDirectory(Path(run_path))
    if not (run.run_json.exists() or run.config.exists() or run.heartbeats.is_dir()):
        raise ValueError(f"{run_path}: not a run directory (no run.json, config.yaml or heartbeats/)")
    now = time.time() if now is None else now
    heartbeats = [replace(item, gone=over) for item in read_heartbeats(run)]
    living = [] if over else heartbeats
    parts = [
        f"run {run.path}",
        head_text(heartbeats, now),
        ranks_text(heartbeats, now) if heartbeats else "",
        stalled_text(living, now),
        waits_text(living, now),
        oldest_text(living),
        gauges_text(heartbeats),
        figures_text(run),
        files_text(run),
        errors_text(run),
    ]
    return "\n".join(part for part in parts if part)


def head_text(heartbeats: list[HeartbeatFile], now: float) -> str:
    """Which attempt, how many ranks, and how long the job goes on."""
    if not heartbeats:
        return "no heartbeats yet"
    states = Counter(state_of(item, now) for item in heartbeats)
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    ends_at = next((item.heartbeat.ends_at for item in heartbeats if item.heartbeat.ends_at is not None), None)
    running = bool({"alive", "silent"} & set(states))
    rest = "" if ends_at is None or not running else f", the job ends in {duration(max(0.0, ends_at - now))}"
    return f"attempt {heartbeats[0].attempt}, {len(heartbeats)} ranks ({counts}){rest}"


def ranks_text(heartbeats: list[HeartbeatFile], now: float) -> str:
    """The table of ranks: a line for each thread, marked when it stands long in one phase."""
    shown = heartbeats if len(heartbeats) <= MAX_ROWS else _notable(heartbeats, now)[:MAX_ROWS]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "role", "host", "pid", "state", "heard", "version", "since", "doing"):
        table.add_column(name, justify="right" if name in ("rank", "pid", "heard", "version", "since") else "left")
    for item in shown:
        beat, age = item.heartbeat, item.age_seconds(now)
        about = (str(beat.rank), beat.role, beat.host, str(beat.pid), state_of(item, now), f"{age:.0f} s ago")
        for number, thread in enumerate(threads_of(item, now)):
            cells = (*about, str(beat.version)) if number == 0 else ("",) * 7
            table.add_row(*cells, duration(thread.seconds), _doing(thread))
    hidden = len(heartbeats) - len(shown)
    return _drawn(table) + (f"\nand {hidden} more ranks, not in trouble" if hidden else "")


def _doing(thread: ThreadNow) -> str:
    who = f"{thread.phase.who}: " if thread.phase.who else ""
    mark = f"  ({thread.mark})" if thread.mark else ""
    return f"{who}{thread.phase.phase}{mark}"


def _notable(heartbeats: list[HeartbeatFile], now: float) -> list[HeartbeatFile]:
    """The head, silent ranks, and ranks with a thread that stands still."""
    return [
        item
        for item in heartbeats
        if item.heartbeat.rank == 0
        or state_of(item, now) == "silent"
        or (state_of(item, now) == "alive" and any(thread.mark for thread in threads_of(item, now)))
    ]


def oldest_text(heartbeats: list[HeartbeatFile]) -> str:
    """The oldest thing in flight, as gauges named `…/oldest_seconds` (and `…/oldest_group`) tell."""
    found = []
    for item in heartbeats:
        gauges = item.heartbeat.gauges
        for name, seconds in gauges.items():
            who, _, kind = name.rpartition("/")
            if kind == "oldest_seconds" and seconds > 0:
                found.append((seconds, item.heartbeat.rank, who, gauges.get(f"{who}/oldest_group")))
    if not found:
        return ""
    seconds, rank, who, group = max(found, key=lambda entry: entry[0])
    name = f"group {group:.0f}" if group is not None else "an episode"
    return f"oldest in flight: {name} since {seconds:.0f} s, rank {rank} {who}".rstrip()


def gauges_text(heartbeats: list[HeartbeatFile]) -> str:
    """A line for each gauge: ranks side by side, or least, mean and most of many ranks."""
    having = [item.heartbeat for item in heartbeats if item.heartbeat.gauges]
    names = sorted({name for beat in having for name in beat.gauges})
    if not names:
        return ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("gauge")
    side_by_side = len(having) <= MAX_COLUMNS
    for title in [f"rank {beat.rank}" for beat in having] if side_by_side else ["ranks", "least", "mean", "most", "on"]:
        table.add_column(title, justify="right")
    for name in names:
        if side_by_side:
            table.add_row(name, *(_number(beat.gauges.get(name)) for beat in having))
            continue
        values = {beat.rank: beat.gauges[name] for beat in having if name in beat.gauges}
        most = max(values, key=lambda rank: values[rank])
        mean = sum(values.values()) / len(values)
        figures = (min(values.values()), mean, values[most])
        table.add_row(name, str(len(values)), *map(_number, figures), f"rank {most}")
    return _drawn(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _drawn(table: Table) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


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
    """What lies in the run directory; a checkpoint that is being written is none yet."""
    shards = list(run.shards.glob("*/*.h5"))
    steps = [path.name.removeprefix("step-") for path in run.checkpoints.glob("step-*")]
    checkpoints = sorted(int(step) for step in steps if step.isdigit())
    aside = [path for path in run.set_aside.glob("*") if not path.name.endswith(".reason.json")]
    newest = f" (newest step-{checkpoints[-1]})" if checkpoints else ""
    return f"{len(shards)} shards, {len(checkpoints)} checkpoints{newest}, {len(aside)} files set aside"


def errors_text(run: RunDirectory) -> str:
    """One sentence for each of the newest error records."""
    records = sorted(run.errors.glob("*.json"), key=lambda path: (len(path.name), path.name))
    older = len(records) - MAX_ERRORS
    sentences = [f"{older} older error records in {run.errors}"] if older > 0 else []
    for path in records[-MAX_ERRORS:]:
        try:
            record = json.loads(path.read_bytes())
            who = f"rank {record.get('rank', '?')} ({record.get('role', '?')}, {record.get('host', '?')}) in phase "
            who = "" if record.get("rank") == -1 else f"{who}{record.get('phase', '?')!r}: "
            stacks = sorted(int(rank) for rank in record.get("stacks", {}))
            holds = f" (with the stacks of {ranks_in_words(stacks)})" if stacks else ""
            sentences.append(
                f"error in attempt {record.get('attempt', '?')}: {who}{record.get('error', 'unknown')}\n"
                f"  see {path}{holds}"
            )
        except (OSError, ValueError, AttributeError) as error:
            sentences.append(f"error record {path} cannot be read: {error}")
    return "\n".join(sentences)
