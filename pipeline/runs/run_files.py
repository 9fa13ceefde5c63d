"""Examines the other files of a run: metrics, shards, archives, what was set aside, what was left over, the disk."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.observe.metrics import metrics_path, read_metrics
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs import disk_estimate
from pekoe.pipeline.runs.disk_estimate import amount
from pekoe.pipeline.runs.finding import Finding, counted, first_few, note, ok, problem
from pekoe.pipeline.runs.rank_health import Places
from pekoe.pipeline.runs.saved_state import LedgerFacts, ResumePoint

SHOWN_FIGURES = ("reward/mean", "eval/accuracy", "train/loss", "staleness/max", "time/step")
REASON_RECORD = ".reason.json"
OTHER_FORMAT = re.compile(r"seal of format|schema version")
SHOWN_NAMES = 5


def examine_metrics(run: RunDirectory, config: RunConfig | None) -> list[Finding]:
    """How far the run has come, and whether its metrics can be read."""
    lines = read_metrics(run)
    try:
        written = [line for line in metrics_path(run).read_bytes().split(b"\n") if line.strip()]
    except FileNotFoundError:
        written = []
    findings = []
    if len(written) > len(lines):
        text = f"metrics/metrics.jsonl: {counted(len(written) - len(lines), 'line')} cannot be read and are left out"
        findings.append(note("progress", text, "nothing to do: the report and a resumption leave them out, too"))
    of = "" if config is None or config.total_train_steps is None else f" of at most {config.total_train_steps}"
    if not lines:
        if any(run.ledger.glob("step-*.json")):
            text = "metrics/metrics.jsonl holds no figures, though the ledger holds steps"
            return [*findings, note("progress", text, "restore it from a copy; the run does not need it to go on")]
        return [*findings, note("progress", f"no figures yet (no step{of} was done)")]
    newest = {name: value for line in lines for name, value in line.values.items() if name in SHOWN_FIGURES}
    shown = ", ".join(f"{name} {newest[name]:.4g}" for name in SHOWN_FIGURES if name in newest)
    return [*findings, ok("progress", f"step {max(line.step for line in lines)}{of}: {shown}")]


def examine_shards(
    run: RunDirectory, config: RunConfig | None, start: ResumePoint, ledger: LedgerFacts, *, deep: bool, running: bool
) -> list[Finding]:
    """Every shard: damaged ones with the reason, and what a resumption would adopt.

    Shards with a group that has not ended are read whole, as a resumption does; others only with `deep`.
    """
    from pekoe.pipeline.trajectory.shard import BadShard, Shard
    from pekoe.pipeline.trajectory.store import Store

    store = Store(run)
    ended = ledger.ended(start.step)
    damaged: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    names = store.paths()
    for name in names:
        try:
            with Shard(run.path / name) as shard:
                groups = set(shard.group_numbers())
            is_spent = groups <= ended
            if is_spent and not deep:
                counts["spent"] += 1
                continue
            notice = store.notice(name)
        except BadShard as error:
            damaged.setdefault(error.reason, []).append(name)
            continue
        except OSError as error:
            if error.errno not in files.LATE:
                damaged.setdefault(f"cannot be read: {error.strerror}", []).append(name)
            continue
        newest = max(row.max_version for group in notice.groups for row in group.rows)
        counts["spent" if is_spent else "open" if newest <= start.step else "later"] += 1
    findings = [_damaged(run, bad, reason, running) for reason, bad in damaged.items()]
    findings += _kept(run, config, start, ledger, set(names))
    what = "every byte checked" if deep else "bytes checked of those that are not trained on"
    findings.append(ok("shards", f"{counts.total()} whole ({what}), {counts['spent']} of them trained on"))
    if counts["open"] and not running:
        findings.append(
            ok("shards", f"{counts['open']} not trained on: a resumption adopts what of them is not too stale")
        )
    if counts["later"] and not running:
        text = f"{counts['later']} with tokens of versions after step {start.step}: a resumption sets them aside"
        findings.append(note("shards", f"{text} and samples their groups again"))
    return findings


def _damaged(run: RunDirectory, names: list[str], reason: str, running: bool) -> Finding:
    if OTHER_FORMAT.search(reason):
        step = f"look with the code of the run: PYTHONPATH={run.code} pekoe doctor {run.path}"
        return note("shards", f"{counted(len(names), 'shard')} of another version of Pekoe: {reason}", step)
    step = "nothing to do: it is set aside when it is read, and its groups are sampled again"
    if not running:
        step = f"pekoe run --resume {run.path} (sets it aside; groups that are not trained on are sampled again)"
    more = f"; all of them: pekoe shards verify {run.path}" if len(names) > SHOWN_NAMES else ""
    return problem("shards", f"damaged: {reason}: {first_few(names, SHOWN_NAMES)}", step + more)


def _kept(
    run: RunDirectory, config: RunConfig | None, start: ResumePoint, ledger: LedgerFacts, there: set[str]
) -> list[Finding]:
    """Where consumed shards are kept, one that the ledger names and that is gone is lost."""
    if config is None or config.rollout.keep_trajectories != "shards":
        return []
    aside = {path.name for path in run.set_aside.glob("*")}
    gone = [name for name in sorted(ledger.consumed_shards(start.step) - there) if name.replace("/", "__") not in aside]
    if not gone:
        return []
    text = f"{counted(len(gone), 'kept shard')} that the ledger names missing: {first_few(gone)}"
    return [problem("shards", text, "training does not need them any more; restore them from a copy if you do")]


def examine_archive(run: RunDirectory, deep: bool) -> list[Finding]:
    """Archived trajectories: `deep` reads every byte, else what says where things lie in them."""
    from pekoe.pipeline.trajectory.archive import archive_files
    from pekoe.pipeline.trajectory.shard import BadShard, Shard

    findings, rows = [], 0
    paths = archive_files(run)
    for path in paths:
        try:
            with Shard(path) as shard:
                rows += shard.num_rows
                if deep:
                    shard.verify()
        except (BadShard, OSError) as error:
            step = "training does not need it; restore it from a copy if you need these trajectories"
            findings.append(problem("shards", f"{run.relative(path)} is damaged: {error}", step))
    if paths:
        findings.append(ok("shards", f"{rows} kept in {counted(len(paths), 'archive')}"))
    return findings


def examine_set_aside(run: RunDirectory) -> list[Finding]:
    """What was taken out of the run, by reason."""
    reasons: dict[str, list[Path]] = {}
    findings = []
    for path in sorted(run.set_aside.iterdir()) if run.set_aside.is_dir() else ():
        if path.name.endswith(REASON_RECORD):
            if not path.with_name(path.name.removesuffix(REASON_RECORD)).exists():
                findings.append(note("set aside", f"{path.name}: the file that it speaks of is gone"))
            continue
        try:
            reason = str(json.loads(path.with_name(f"{path.name}{REASON_RECORD}").read_bytes())["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            reason = "no readable reason"
            findings.append(note("set aside", f"set-aside/{path.name} has no readable reason beside it"))
        reasons.setdefault(re.sub(r"\d+", "N", reason), []).append(path)
    for reason, paths in sorted(reasons.items()):
        text = (
            f"{counted(len(paths), 'file')}, {amount(_size(paths))}: {reason} ({first_few([p.name for p in paths], 2)})"
        )
        findings.append(note("set aside", text))
    if reasons:
        step = f"nothing of it is used; when you have looked: rm -r {run.set_aside}/*"
        findings.append(note("set aside", f"{amount(_size([p for ps in reasons.values() for p in ps]))} in all", step))
    return findings


def examine_left_overs(run: RunDirectory, running: bool) -> list[Finding]:
    """Files that a writer had begun and not published, where none is at work."""
    if running:
        return []
    found = [
        Path(folder) / name
        for top in (run.checkpoints, run.shards, run.archive, run.ledger, run.exports, run.weights, run.metrics)
        for folder, folders, names in os.walk(top)
        for name in (*folders, *names)
        if name.endswith((files.PART, files.DISCARDED, files.PREVIOUS))
    ]
    if not found:
        return []
    shown = first_few([run.relative(path) for path in found], 3)
    text = f"{counted(len(found), 'unfinished file or folder', 'unfinished files or folders')}, {amount(_size(found))}"
    return [note("files", f"{text}: {shown}", "nothing to do: they count for nothing; the next attempt removes them")]


def examine_disk(run: RunDirectory, config: RunConfig | None, places: Places | None, finished: bool) -> list[Finding]:
    """What is used, what may still come, what is free."""
    free = disk_estimate.free_space(run.path)
    num_bytes, num_files = disk_estimate.used(run)
    inodes = "" if free.inodes is None else f" and {free.inodes:,} inodes"
    text = f"{amount(num_bytes)} in {num_files} files used, {amount(free.bytes)}{inodes} free (a quota is not visible)"
    findings = [ok("disk", text)]
    if config is None or finished:
        return findings
    trainers, rollouts = (len(places.trainer_ranks), len(places.rollout_ranks)) if places else (1, 1)
    try:
        model = disk_estimate.model_facts(Path(config.actor.path))
        made = disk_estimate.estimate(config, model, num_trainers=trainers, num_rollouts=rollouts)
    except Exception as error:
        return [*findings, note("disk", f"no estimate: actor.path {config.actor.path}: {error}")]
    one = disk_estimate.checkpoint_bytes(config, model, trainers)
    findings.append(ok("disk", made.sentence()))
    shortage = disk_estimate.shortage_of(run, made, one)
    if shortage is not None:
        findings.append(problem("disk", shortage.sentence, f"free space: df -h {run.path}; du -sh {run.path}/*"))
    return findings


def _size(paths: Sequence[Path]) -> int:
    """Bytes of files and of folders' files."""
    total = 0
    for path in paths:
        inside: list[Path] = [path] if path.is_file() else list(path.rglob("*"))
        for file in inside:
            try:
                total += file.stat().st_size
            except OSError:
                continue
    return total
