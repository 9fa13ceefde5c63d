"""What an examination of a run finds: each thing with how bad it is and what to do about it."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; the run goes on, or goes on by itself when it is resumed."""
    PROBLEM = "problem"
    """Something is lost, damaged or failed."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    area: str
    """What it speaks of: attempts, progress, ranks, checkpoints, ledger, shards, exports, set aside, disk, files."""
    severity: Severity
    text: str
    next_step: str = ""
    """What to do, in words, with the exact command; empty where there is nothing to do."""


def ok(area: str, text: str) -> Finding:
    return Finding(area, Severity.OK, text)


def note(area: str, text: str, next_step: str = "") -> Finding:
    return Finding(area, Severity.NOTE, text, next_step)


def problem(area: str, text: str, next_step: str = "") -> Finding:
    return Finding(area, Severity.PROBLEM, text, next_step)


def first_few(names: Iterable[object], most: int = 5) -> str:
    """`a, b, c and 4 more`."""
    shown = [str(name) for name in names]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def counted(count: int, singular: str, plural: str = "") -> str:
    """`1 shard`, `2 shards`."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def problems_of(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is Severity.PROBLEM]


def report_text(title: str, findings: Sequence[Finding]) -> str:
    """For people: by area, the next step under each finding, a verdict at the end."""
    lines = [title]
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            lines.append(area)
        mark = {Severity.OK: "ok", Severity.NOTE: "note", Severity.PROBLEM: "PROBLEM"}[finding.severity]
        first, *more = finding.text.splitlines() or [""]
        lines.append(f"  {mark:<8}{first}")
        lines += [f"          {line}" for line in more]
        if finding.next_step:
            lines.append(f"          -> {finding.next_step}")
    problems = problems_of(findings)
    notes = sum(finding.severity is Severity.NOTE for finding in findings)
    found = counted(len(problems), "problem") if problems else "nothing is wrong"
    lines.append(f"{found}, {counted(notes, 'note')}")
    return "\n".join(lines)


def report_json(subject: dict[str, object], exit_code: int, findings: Sequence[Finding]) -> str:
    """The same for programs: what was examined, the exit code, the findings."""
    listed = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({**subject, "exit_code": exit_code, "findings": listed}, indent=1)
