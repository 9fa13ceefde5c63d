"""Examines what a run goes on from: its checkpoints, its ledger, its exports."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pekoe.pipeline import complete_folder
from pekoe.pipeline.complete_folder import IncompleteFolderError
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.records import epoch_and_position
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.finding import Finding, counted, first_few, note, ok, problem
from pekoe.pipeline.train.checkpoint import NAME
from pekoe.pipeline.trajectory.ledger import Ledger, StepRecord


@dataclass(frozen=True)
class ResumePoint:
    """Where the next attempt begins."""

    step: int
    """0: from the beginning."""
    checkpoint: Path | None
    """None: there never was one, or `is_lost`."""
    is_lost: bool = False
    """There are checkpoints, and all are damaged: the run does not go on until somebody decides."""


@dataclass
class LedgerFacts:
    """What the readable records say."""

    records: dict[int, StepRecord] = field(default_factory=dict)

    def ended(self, up_to_step: int | None = None) -> set[int]:
        """Groups that have ended, in all or by a step."""
        return {entry.group for record in self._until(up_to_step) for entry in record.ended}

    def consumed_shards(self, up_to_step: int | None = None) -> set[str]:
        return {entry.shard for record in self._until(up_to_step) for entry in record.consumed}

    def _until(self, step: int | None) -> Iterator[StepRecord]:
        return (record for number, record in self.records.items() if step is None or number <= step)


def examine_checkpoints(run: RunDirectory, deep: bool) -> tuple[list[Finding], ResumePoint]:
    """Each checkpoint against its marker (`deep`: also hashes), and the one that a resumption takes."""
    findings: list[Finding] = []
    complete: list[tuple[int, int, Path]] = []
    damaged: list[Path] = []
    found = (
        (int(match[1]), int(match[2] or 0), path)
        for path in (run.checkpoints.iterdir() if run.checkpoints.is_dir() else ())
        if (match := NAME.fullmatch(path.name)) and path.is_dir()
    )
    for step, save, path in sorted(found):
        try:
            complete_folder.verify(path, deep)
        except (IncompleteFolderError, OSError, ValueError) as error:
            damaged.append(path)
            findings.append(
                problem(
                    "checkpoints",
                    f"{path.name} is damaged: {str(error).removeprefix(f'{path}: ')}",
                    f"it is passed over; restore the file from a copy, or move it away: mv {path} {run.set_aside}/",
                )
            )
            continue
        complete.append((step, save, path))
        what = "complete, hashes compared" if deep else "complete, sizes compared"
        findings.append(ok("checkpoints", f"{path.name}: {what}"))
    if complete:
        step, _, path = max(complete)
        unsure = "" if deep else ", if its hashes agree, too: --deep compares them"
        findings.append(ok("checkpoints", f"a resumption goes on from step {step} ({path.name}{unsure})"))
        return findings, ResumePoint(step, path)
    if damaged:
        findings.append(
            problem(
                "checkpoints",
                "all checkpoints are damaged: a resumption stops and says so, it never starts over by itself",
                f"restore one from a copy; or, to start again from step 0: mv {run.checkpoints}/step-* "
                f"{run.set_aside}/ && pekoe run --resume {run.path}",
            )
        )
        return findings, ResumePoint(0, None, is_lost=True)
    recorded = sum(1 for _ in run.ledger.glob("step-*.json"))
    though = f", though {counted(recorded, 'step')} are recorded" if recorded else ""
    findings.append(note("checkpoints", f"none{though}: a resumption begins at step 0"))
    return findings, ResumePoint(0, None)


def examine_ledger(run: RunDirectory, start: ResumePoint, is_running: bool) -> tuple[list[Finding], LedgerFacts]:
    """Gaps, damaged records, groups that ended twice; totals by epoch."""
    ledger, facts = Ledger(run), LedgerFacts()
    findings: list[Finding] = []
    steps, foreign = _recorded_steps(run)
    for name in foreign:
        findings.append(
            note("ledger", f"ledger/{name} is not the name of a record", f"mv {run.ledger / name} elsewhere")
        )
    bad: dict[int, str] = {}
    for step in steps:
        try:
            facts.records[step] = ledger.read_step(step)
        except (ValueError, OSError) as error:
            bad[step] = str(error)
    for step in sorted(set(range(1, max([*steps, start.step], default=0) + 1)) - set(steps)):
        bad[step] = f"no record of step {step} (ledger/step-{step:08d}.json)"
    for step, reason in sorted(bad.items()):
        findings.append(_bad_record(run, step, reason, start))
    findings += _twice(facts, start)
    after = [step for step in steps if step > start.step]
    if after and not is_running and not start.is_lost:
        findings.append(
            note(
                "ledger",
                f"{counted(len(after), 'step')} after the newest checkpoint (up to {after[-1]}): a resumption sets "
                f"them aside and does them again from step {start.step}: in what stays nothing is trained on twice",
            )
        )
    return findings + _totals(facts), facts


def _recorded_steps(run: RunDirectory) -> tuple[list[int], list[str]]:
    """(steps by the names of their records, names that are none)."""
    names = [path.name for path in run.ledger.glob("*.json")]
    steps = {name: name.removeprefix("step-").removesuffix(".json") for name in names if name.startswith("step-")}
    foreign = [name for name in names if not name.startswith(("step-", "end-"))]
    foreign += [name for name, digits in steps.items() if not digits.isdecimal()]
    return sorted(int(digits) for digits in steps.values() if digits.isdecimal()), sorted(foreign)


def _bad_record(run: RunDirectory, step: int, reason: str, start: ResumePoint) -> Finding:
    text = reason.removeprefix("ledger: ")
    if step > start.step:
        return note("ledger", f"{text}; it lies after the newest checkpoint and is done again when the run is resumed")
    before = [path for path in sorted(run.checkpoints.glob("step-*")) if _step_of(path) >= step]
    moved = " ".join(str(path) for path in before)
    return problem(
        "ledger",
        f"{text}; a resumption needs it, since its groups would be trained on again",
        f"restore the record from a copy; or go back to step {step - 1} or earlier: mv {moved or '(its checkpoints)'} "
        f"{run.set_aside}/ && pekoe run --resume {run.path}",
    )


def _step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _twice(facts: LedgerFacts, start: ResumePoint) -> list[Finding]:
    """A group ends exactly once in an epoch, and its number holds the epoch."""
    ends: dict[int, list[int]] = {}
    for step, record in facts.records.items():
        for entry in record.ended:
            ends.setdefault(entry.group, []).append(step)
    twice = {group: steps for group, steps in ends.items() if len(steps) > 1}
    if not twice:
        return []
    shown = first_few(
        f"epoch {epoch} position {position} in steps {' and '.join(map(str, steps))}"
        for (epoch, position), steps in ((epoch_and_position(group), steps) for group, steps in sorted(twice.items()))
    )
    after = all(sorted(steps)[1] > start.step for steps in twice.values())
    what = "a resumption does these steps again" if after else "report it with the ledger folder"
    return [problem("ledger", f"{counted(len(twice), 'group')} ended twice: {shown}", what)]


def _totals(facts: LedgerFacts) -> list[Finding]:
    kinds = ("consumed", "filtered", "skipped")
    counts: dict[int, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for record in facts.records.values():
        for kind in kinds:
            for entry in getattr(record, kind):
                counts.setdefault(epoch_and_position(entry.group)[0], Counter())[kind] += 1
                if entry.reason:
                    reasons[entry.reason.splitlines()[0][:80]] += 1
    findings = [ok("ledger", f"{counted(len(facts.records), 'step')} recorded")]
    texts = [(epoch, ", ".join(f"{found[kind]} {kind}" for kind in kinds)) for epoch, found in sorted(counts.items())]
    for text, same in itertools.groupby(texts, key=lambda item: item[1]):
        epochs = [epoch for epoch, _ in same]
        each = f"epochs {epochs[0]} to {epochs[-1]}, each" if len(epochs) > 1 else f"epoch {epochs[0]}"
        findings.append(ok("ledger", f"{each}: {text}"))
    if reasons:
        often = first_few(f"{reason} ({count})" for reason, count in reasons.most_common())
        findings.append(note("ledger", f"reasons of filtered and skipped groups: {often}"))
    return findings


def examine_exports(run: RunDirectory, config: RunConfig | None) -> list[Finding]:
    """Whether the headers of each export fit its files. A copy of the weights: damage costs the copy only."""
    from safetensors import SafetensorError

    from pekoe.pipeline.runs.disk_estimate import model_facts

    findings = []
    # A reward model has a row of scores in place of what it began with.
    expected = None if config is None or config.task == "rw" else _parameters(Path(config.actor.path))
    for path in sorted(run.exports.glob("step-*"), key=lambda path: (len(path.name), path.name)):
        if path.suffix or not path.is_dir():
            continue
        again = f"write it again: pekoe export {run.path} OUT --step {path.name.removeprefix('step-')}"
        try:
            facts = model_facts(path)
            json.loads((path / "config.json").read_bytes())
        except (SafetensorError, ValueError, OSError) as error:
            findings.append(problem("exports", f"exports/{path.name} is damaged: {error}", again))
            continue
        if expected is not None and facts.num_parameters != expected:
            text = f"exports/{path.name} has {facts.num_parameters} parameters, the model {expected}"
            findings.append(problem("exports", text, again))
        else:
            findings.append(ok("exports", f"{path.name}: {facts.num_parameters:,} parameters"))
    return findings


def _parameters(folder: Path) -> int | None:
    from safetensors import SafetensorError

    from pekoe.pipeline.runs.disk_estimate import model_facts

    try:
        return model_facts(folder).num_parameters
    except (SafetensorError, ValueError, OSError):
        return None
