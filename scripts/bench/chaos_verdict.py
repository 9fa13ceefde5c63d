"""What a tormented run must look like when it has come to its end, from its directory alone."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_user import is_filtered
from chaos_world import BATCH, EXAMPLES

from pekoe.pipeline.data.cursor import epoch_order
from pekoe.pipeline.records import epoch_and_position, group_number
from pekoe.pipeline.trajectory.shard import Shard

PASSING = (".part", ".discarded")


@dataclass
class Verdict:
    """Counts are 0 when all is well; `problems` says more."""

    lost: int = 0
    """Groups that the data has and the surviving ledger has not."""
    trained_twice: int = 0
    """Groups or rows that are in the surviving ledger more than once, or rows that are not those of their group."""
    out_of_order: int = 0
    """Groups that were let in before their turn came."""
    steps: int = 0
    adopted: int = 0
    issued_again: int = 0
    problems: list[str] = field(default_factory=list)


def judge(run: Path, seed: int, epochs: int, eta: int) -> Verdict:
    """Reads ledger, shards, metrics and what was set aside."""
    verdict = Verdict()
    records = [json.loads(path.read_text()) for path in sorted((run / "ledger").glob("step-*.json"))]
    ends = records + [json.loads(path.read_text()) for path in (run / "ledger").glob("end-*.json")]
    verdict.steps = len(records)
    if [record["step"] for record in records] != list(range(1, len(records) + 1)):
        verdict.problems.append(f"ledger of steps {[record['step'] for record in records]}")
    orders = [epoch_order(EXAMPLES, seed, epoch, True) for epoch in range(epochs)]
    expected: dict[str, set[int]] = {"consumed": set(), "filtered": set(), "skipped": set()}
    for epoch, order in enumerate(orders):
        for position, example in enumerate(order):
            how = "filtered" if is_filtered(int(example)) else "consumed"
            expected[how].add(group_number(epoch, position))
    for how, groups in expected.items():
        found = Counter(entry[0] for record in ends for entry in record[how])
        verdict.lost += len(groups - set(found))
        verdict.trained_twice += sum(count - 1 for count in found.values())
        if set(found) - groups:
            verdict.problems.append(f"{how}, but should not be: {sorted(set(found) - groups)[:5]}")
    verdict.out_of_order = _out_of_order(records, eta)
    _check_rows(run, records, verdict)
    _check_metrics(run, verdict)
    _check_remains(run, verdict)
    return verdict


def sequence(run: Path) -> list[Any]:
    """What the ledger says, step by step, but for the names of shards and the time."""
    records = [json.loads(path.read_text()) for path in sorted((run / "ledger").glob("step-*.json"))]
    return [
        [record["step"], *([entry[:2] for entry in record[how]] for how in ("consumed", "filtered", "skipped"))]
        for record in records
    ]


def fingerprint(run: Path) -> str:
    """Of the exported weights of the last version."""
    folders = sorted((run / "exports").glob("step-*"), key=lambda path: int(path.name[5:]))
    return folders[-1].name + hashlib.sha256((folders[-1] / "model.safetensors").read_bytes()).hexdigest()


def _out_of_order(records: list[dict[str, Any]], eta: int) -> int:
    """By any step, at most (eta + 1) batches of groups before a group that has ended may still be open."""
    ended, count = 0, 0
    for record in records:
        entries = [entry for how in ("consumed", "filtered", "skipped") for entry in record[how]]
        ended += len(entries)
        for entry in entries:
            epoch, position = epoch_and_position(entry[0])
            count += epoch * EXAMPLES + position >= ended + (eta + 1) * BATCH
    return count


def _check_rows(run: Path, records: list[dict[str, Any]], verdict: Verdict) -> None:
    """Each row that the ledger names is there, belongs to its group, and was sampled early enough."""
    used: Counter[tuple[str, int]] = Counter()
    groups: dict[str, list[int]] = {}
    for record in records:
        for number, _, shard, rows, *_ in record["consumed"]:
            used.update((shard, row) for row in rows)
            if shard not in groups:
                if not (run / shard).exists():
                    verdict.problems.append(f"{shard} of step {record['step']} is gone")
                    groups[shard] = []
                    continue
                with Shard(run / shard) as opened:
                    opened.verify()
                    groups[shard] = [group.number for group in opened.groups() for _ in group.trajectories]
            if groups[shard] and {groups[shard][row] for row in rows} != {number}:
                verdict.trained_twice += 1
                verdict.problems.append(f"{shard} rows {rows} are not of group {number}")
    verdict.trained_twice += sum(count - 1 for count in used.values())


def _check_metrics(run: Path, verdict: Verdict) -> None:
    lines = [json.loads(line) for line in (run / "metrics" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    if [line["step"] for line in steps] != list(range(1, verdict.steps + 1)):
        verdict.problems.append(f"metrics of steps {[line['step'] for line in steps]}")
    if [line["attempt"] for line in steps] != sorted(line["attempt"] for line in steps):
        verdict.problems.append("metrics of an abandoned future")
    for line in steps[-1:]:
        verdict.adopted = int(line.get("groups_total/adopted", 0))
        verdict.issued_again = int(line.get("groups_total/issued_again", 0))


def _check_remains(run: Path, verdict: Verdict) -> None:
    """Nothing half written is left, and nothing newer than the last step."""
    for path in run.rglob("*"):
        if path.name.endswith(PASSING) and "heartbeats" not in path.parts:
            verdict.problems.append(f"left over: {path.relative_to(run)}")
    for folder, prefix in (("exports", "step-"), ("weights", "v-"), ("checkpoints", "step-")):
        for path in (run / folder).glob(f"{prefix}*"):
            number = path.name.removeprefix(prefix).partition(".")[0]
            if number.isdigit() and int(number) > verdict.steps:
                verdict.problems.append(f"of a future that was abandoned: {path.relative_to(run)}")
