"""`pekoe doctor RUN`: what happened to a run and what to do, from its files alone.

    run.json, errors, logs, heartbeats ─► attempts: how each began and ended
    checkpoints ─► where a resumption begins ─► ledger ─► shards: what of them it takes
    metrics, exports, set-aside, unfinished files, disk

Reads by the run's own readers, changes nothing, and answers whatever the files look like: what an examination cannot
make sense of is a finding, too. Imports neither torch nor MPI.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import all_keys
from pekoe.pipeline.config.snapshot import read_run_config
from pekoe.pipeline.config.tasks import is_supervised
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs import run_files
from pekoe.pipeline.runs.attempt_history import AttemptFacts, End, read_attempts, sentence
from pekoe.pipeline.runs.finding import (
    Finding,
    first_few,
    note,
    ok,
    problem,
    problems_of,
    report_json,
    report_text,
)
from pekoe.pipeline.runs.rank_health import Places, examine_ranks
from pekoe.pipeline.runs.saved_state import (
    LedgerFacts,
    ResumePoint,
    examine_checkpoints,
    examine_exports,
    examine_ledger,
)

EXIT_WELL, EXIT_PROBLEMS = 0, 1
LIMIT_KEY = re.compile(r"\b(?:cluster|rollout|weights|recover|reward|actor)\.[a-z_]+(?:\.[a-z_]+)?\b")
OUT_OF_ROOM = re.compile(r"disk is full|No space left|Disk quota|ENOSPC|EDQUOT", re.I)
START_SECONDS = 600.0
"""An attempt of which nothing is heard is taken for starting up so long."""


@dataclass(frozen=True)
class Diagnosis:
    """All that was found, in the order of reading."""

    run: Path
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 when there is a problem."""
        return EXIT_PROBLEMS if self.problems else EXIT_WELL

    @property
    def problems(self) -> list[Finding]:
        return problems_of(self.findings)

    def text(self) -> str:
        """For people: by area, the next step under each finding, a verdict at the end."""
        return report_text(f"run {self.run}", self.findings)

    def json(self) -> str:
        """The same for programs."""
        return report_json({"run": str(self.run)}, self.exit_code, self.findings)


def diagnose(
    run: RunDirectory,
    *,
    deep: bool = False,
    place: Callable[[RunConfig], Places] | None = None,
    now: float | None = None,
) -> Diagnosis:
    """Examines a run. `deep` reads every byte of checkpoints and shards; `place` says which ranks a configuration
    gives."""
    now = time.time() if now is None else now
    findings: list[Finding] = []

    def examine(area: str, examination: Callable[[], list[Finding]]) -> None:
        try:
            findings.extend(examination())
        except Exception as error:
            text = f"cannot be examined: {type(error).__name__}: {error}"
            findings.append(problem(area, text, f"look into {run.path} by hand; ls -la shows owners and permissions"))

    config, places = None, None
    attempts: list[AttemptFacts] = []
    try:
        config = read_run_config(run)
        places = place(config) if place else None
    except Exception as error:
        findings.append(_bad_config(run, error))
    findings += _layout(run)
    examine("attempts", lambda: _attempts(run, config, attempts, now))
    end = attempts[-1].end if attempts else End.UNHEARD
    running = end is End.RUNNING
    examine("progress", lambda: run_files.examine_metrics(run, config))
    examine("ranks", lambda: examine_ranks(run, places, now))
    start, ledger = ResumePoint(0, None), LedgerFacts()

    def checkpoints() -> list[Finding]:
        nonlocal start
        found, start = examine_checkpoints(run, deep)
        return found

    def records() -> list[Finding]:
        nonlocal ledger
        if config is not None and is_supervised(config):
            return []
        found, ledger = examine_ledger(run, start, running)
        return found

    examine("checkpoints", checkpoints)
    examine("ledger", records)
    examine("shards", lambda: run_files.examine_shards(run, config, start, ledger, deep=deep, running=running))
    examine("shards", lambda: run_files.examine_archive(run, deep))
    examine("exports", lambda: examine_exports(run, config))
    examine("set aside", lambda: run_files.examine_set_aside(run))
    examine("files", lambda: run_files.examine_left_overs(run, running))
    examine("disk", lambda: run_files.examine_disk(run, config, places, end is End.FINISHED))
    return Diagnosis(run.path, tuple(findings))


def _layout(run: RunDirectory) -> list[Finding]:
    """Names of the run directory that are not the folders that they should be."""
    folders = (run.checkpoints, run.ledger, run.shards, run.metrics, run.exports, run.errors, run.heartbeats)
    wrong = [path for path in (*folders, run.weights, run.set_aside, run.path / "logs") if not path.is_dir()]
    return [
        problem(
            "files",
            f"{path.name} is not a folder",
            f"move it away, and restore the folder if you have a copy: mv {path} elsewhere",
        )
        if path.exists()
        else note("files", f"{path.name}/ is not there", "a resumption makes it anew, empty")
        for path in wrong
    ]


def _bad_config(run: RunDirectory, error: Exception) -> Finding:
    before = sorted(run.path.glob("config-before-*.yaml"))
    step = f"pekoe config show CONFIG key=value… > {run.config} (with what the run was started with)"
    if before:
        step = f"cp {before[-1]} {run.config} (as it was before the last resumption), or {step}"
    return problem("files", f"config.yaml cannot be used: {error}", step)


def _attempts(run: RunDirectory, config: RunConfig | None, found: list[AttemptFacts], now: float) -> list[Finding]:
    found += read_attempts(run, now)
    findings = []
    trouble = _run_json_trouble(run)
    if trouble:
        entries = ", ".join("{}" for _ in found) or "{}"
        text = json.dumps({"id": run.path.name, "attempts": []}).replace("[]", f"[{entries}]")
        step = f"a resumption counts attempts by it; make it anew: echo '{text}' > {run.run_json}"
        findings.append(problem("attempts", f"run.json cannot be read: {trouble}", step))
    if not found:
        findings.append(note("attempts", "none has begun"))
    for index, attempt in enumerate(found):
        findings.append(_attempt(run, config, attempt, index == len(found) - 1, now))
    return findings


def _run_json_trouble(run: RunDirectory) -> str:
    try:
        found = json.loads(run.run_json.read_bytes())
        return "" if isinstance(found["attempts"], list) else "its attempts are no list"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _attempt(run: RunDirectory, config: RunConfig | None, facts: AttemptFacts, is_last: bool, now: float) -> Finding:
    began = "" if facts.began is None else f" began {datetime.fromtimestamp(facts.began):%Y-%m-%d %H:%M:%S}"
    where = f" on {facts.host}" if facts.host else ""
    by = f" by {facts.launcher}" if facts.launcher else ""
    head = f"attempt {facts.number}{began}{where}{by}: "
    resume = f"pekoe run --resume {run.path}" if is_last else ""
    log = f"logs/{facts.number}/rank-0.log"
    match facts.end:
        case End.RUNNING:
            return ok("attempts", f"{head}still running")
        case End.FINISHED:
            return ok("attempts", f"{head}finished")
        case End.STOPPED:
            return note("attempts", f"{head}stopped by {facts.stopped_by}, in order", resume)
        case End.CUT_OFF:
            text = f"{head}stopped by {facts.stopped_by}; it was not over in time and saved nothing then"
            step = f"{resume} cluster.grace_seconds=… (longer, if the job leaves more time)" if is_last else ""
            return (problem if is_last else note)("attempts", text, step)
        case End.FAILED:
            return _failed(run, config, facts, head, is_last)
        case End.UNHEARD if facts.began is not None and now - facts.began < START_SECONDS:
            return note("attempts", f"{head}nothing is heard of it yet: it starts up, or waits for its ranks")
        case _:
            text = f"{head}{facts.end}: no error record, no last word in {log}"
            step = (
                f"whole nodes or the launcher were killed; the job's own output says more. {resume}" if is_last else ""
            )
            return (problem if is_last else note)("attempts", text, step)


def _failed(run: RunDirectory, config: RunConfig | None, facts: AttemptFacts, head: str, is_last: bool) -> Finding:
    record = facts.record
    path = run.errors / f"attempt-{facts.number}.json"
    lines = [f"{head}failed: {sentence(record)}", f"record: {path}{_stacks(record)}"]
    if record.get("log"):
        lines.append(f"log: {run.path / str(record['log'])}")
    text = "\n".join(lines)
    if not is_last:
        return note("attempts", text)
    return problem("attempts", text, _after_failure(run, config, str(record.get("error", ""))))


def _stacks(record: dict[str, object]) -> str:
    """Whose threads' stacks the record holds."""
    ranks = record.get("stacks")
    if isinstance(ranks, dict) and ranks:
        return f" (with the stacks of rank {first_few(ranks)})"
    return " (with its traceback)" if record.get("traceback") else ""


def _after_failure(run: RunDirectory, config: RunConfig | None, error: str) -> str:
    """The next step after an error, by what it says."""
    resume = f"pekoe run --resume {run.path}"
    if OUT_OF_ROOM.search(error):
        return f"free space (df -h {run.path}; du -sh {run.path}/*), then {resume}"
    if "no checkpoint is usable" in error:
        return "see the checkpoints below"
    if "signal 9" in error:
        return f"often the memory ran out: look into the job's output and dmesg; then {resume}"
    if "rollout.logprob_gap_limit" in error:
        looked = "engine and trainer compute differently, and the record says where to look"
        return f"{looked}; only if that is meant: {resume} rollout.logprob_gap_limit=…"
    limits = [text for key in dict.fromkeys(LIMIT_KEY.findall(error)) if (text := _raised(config, key))]
    if limits:
        return f"find out what was waited for (record, log); if the limit was too tight: {resume} {' '.join(limits)}"
    return f"read the record and the log; when the cause is gone: {resume}"


def _raised(config: RunConfig | None, name: str) -> str:
    """`cluster.progress_seconds=3600` for a limit of 1800; empty for a key that is no number or does not exist."""
    key = next((key for key in all_keys() if key.name == name), None)
    if key is None or key.type not in (int, float):
        return ""
    value: object = config
    for part in name.split("."):
        value = getattr(value, part, None)
    return f"{name}={2 * value:g}" if isinstance(value, int | float) else f"{name}=…"
