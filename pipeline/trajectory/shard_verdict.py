"""What `pekoe shards verify` prints: the verdict on each file, and what becomes of the groups of a damaged one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.records import epoch_and_position
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.ledger import Ledger
from pekoe.pipeline.trajectory.shard import BadShard, Shard

REASON = ".reason.json"
SHOWN_GROUPS = 8


def verify_shards(run: RunDirectory, names: Sequence[str]) -> int:
    """Checks every byte of the files; exit code 1 when one is damaged."""
    bad: list[BadShard] = []
    num_gone = 0
    for name in names:
        try:
            with Shard(run.path / name) as shard:
                shard.verify()
        except BadShard as error:
            bad.append(error)
        except FileNotFoundError:
            num_gone += 1
    consumed = _consumed_groups(run) if bad else {}
    for damage in bad:
        print("\n".join(_verdict(run, damage, consumed)))
    there = len(names) - num_gone
    gone = f"; {num_gone} were collected meanwhile" if num_gone else ""
    print(f"{there - len(bad)} of {there} shards are whole{gone}")
    return 1 if bad else 0


def show_leftovers(run: RunDirectory) -> None:
    """Names what is not, or no longer, part of the run: files set aside, each with its reason, and unfinished ones."""
    aside = list(set_aside_files(run))
    if aside:
        print(f"set aside ({run.relative(run.set_aside)}/), not part of the run any more: {len(aside)}")
        for name, reason in aside:
            print(f"  {name}: {reason}")
    unfinished = [*run.shards.glob(f"*/*{files.PART}"), *run.archive.glob(f"*{files.PART}")]
    if unfinished:
        print(f"{len(unfinished)} unfinished (*{files.PART}): being written, or left by a kill and deleted on resume")


def set_aside_files(run: RunDirectory) -> Iterator[tuple[str, str]]:
    """(name, reason) of everything in the set-aside folder."""
    for path in sorted(run.set_aside.iterdir()) if run.set_aside.is_dir() else ():
        if not path.name.endswith(REASON):
            yield path.name, _reason(path.with_name(f"{path.name}{REASON}"))


def _reason(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["reason"])
    except (OSError, ValueError, KeyError):
        return "no reason was written down"


def _consumed_groups(run: RunDirectory) -> dict[str, dict[int, int]]:
    """Shard -> group -> the step that trained on it, as far as the ledger can be read."""
    ledger = Ledger(run)
    found: dict[str, dict[int, int]] = {}
    try:
        records = ledger.read()
    except (OSError, ValueError):
        return {}
    for record in records:
        for entry in record.consumed:
            found.setdefault(entry.shard, {})[entry.group] = record.step
    return found


def _verdict(run: RunDirectory, error: BadShard, consumed: dict[str, dict[int, int]]) -> list[str]:
    name = run.relative(error.path)
    groups = _readable_groups(error.path)
    lines = [f"DAMAGED {name}: {error.reason}"]
    if groups is None:
        lines.append("  groups: unknown, the part that names them is damaged too")
    else:
        more = f" and {len(groups) - SHOWN_GROUPS} more" if len(groups) > SHOWN_GROUPS else ""
        lines.append(f"  groups: {', '.join(map(_group_text, groups[:SHOWN_GROUPS]))}{more}")
    return [*lines, f"  next: {_what_next(run, error.path, groups, consumed.get(name, {}))}"]


def _readable_groups(path: Path) -> list[int] | None:
    try:
        with Shard(path) as shard:
            return list(dict.fromkeys(shard.group_numbers()))
    except (BadShard, OSError):
        return None


def _group_text(group: int) -> str:
    epoch, position = epoch_and_position(group)
    return f"{group} (epoch {epoch}, position {position})"


def _what_next(run: RunDirectory, path: Path, groups: list[int] | None, consumed: dict[int, int]) -> str:
    if path.is_relative_to(run.archive):
        return "its groups have ended, training misses nothing; only what was kept to look at is lost"
    if not consumed:
        return "its groups are sampled again on resume; remove nothing by hand"
    trained = f"{len(consumed)} of its groups were trained on already, the last in step {max(consumed.values())}"
    if groups is not None and set(groups) <= set(consumed):
        return f"{trained}: training misses nothing; remove nothing by hand"
    return f"{trained}; the others are sampled again on resume; remove nothing by hand"
