"""Who waits for whom, and who stands still: from heartbeats, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pekoe.pipeline.messages import Heartbeat, ThreadPhase
from pekoe.pipeline.observe.heartbeat_files import HeartbeatFile
from pekoe.pipeline.observe.phases import WAIT

SILENT_SECONDS = 15.0
"""A rank that said nothing for this long is called silent."""
MAX_WAITS = 12
MAX_RANKS_FOLLOWED = 3
"""Of those that a wait is for: the silent ones and those that stand longest in one phase come first."""
MAX_DEPTH = 4


@dataclass(frozen=True)
class ThreadNow:
    """What a thread of a rank did in its last heartbeat, aged to now."""

    beat: Heartbeat
    phase: ThreadPhase
    seconds: float
    quiet: float
    """Seconds without progress: what its limit counts."""

    @property
    def mark(self) -> str:
        """Empty, or what is said of a thread that stands long in one phase."""
        limit = self.phase.limit
        if limit is None or self.quiet < limit / 2:
            return ""
        return "over its limit" if self.quiet >= limit else "over half of its limit"


def state_of(item: HeartbeatFile, now: float) -> str:
    """`alive`, `silent` (no heartbeat for long), `gone`, or `ended` for a rank that ended in order."""
    if item.heartbeat.phase == "ended":
        return "ended"
    if item.gone:
        return "gone"
    return "alive" if item.age_seconds(now) <= SILENT_SECONDS else "silent"


def threads_of(item: HeartbeatFile, now: float) -> list[ThreadNow]:
    """The threads of a rank; a rank that tells of none counts as one thread without a name."""
    beat = item.heartbeat
    phases = beat.threads or (ThreadPhase("", beat.phase, beat.phase_seconds),)
    age = item.age_seconds(now)
    return [
        ThreadNow(beat, phase, phase.seconds + age, (phase.seconds if phase.quiet is None else phase.quiet) + age)
        for phase in phases
    ]


def seconds_text(thread: ThreadNow) -> str:
    """`41 s of 1800 s`, or `5000 s (41 s of 1800 s without progress)`."""
    limit = f" of {thread.phase.limit:g} s" if thread.phase.limit is not None else ""
    if thread.phase.quiet is None or thread.quiet > thread.seconds - 1.0:
        return f"{thread.seconds:.0f} s{limit}"
    return f"{thread.seconds:.0f} s ({thread.quiet:.0f} s{limit} without progress)"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 4-7`."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ordered) > 1 else ''} {words}"


def stalled_text(items: Sequence[HeartbeatFile], now: float) -> str:
    """One line for each silent rank and each thread that has used up half of its limit; empty if there is none."""
    lines = []
    for item in items:
        beat, state = item.heartbeat, state_of(item, now)
        if state == "silent":
            lines.append(f"silent: rank {beat.rank} ({beat.role}, {beat.host}) for {item.age_seconds(now):.0f} s")
        if state == "alive":
            lines += [
                f"stalled: rank {beat.rank} {thread.phase.who} ({beat.role}, {beat.host}): {thread.phase.phase}, since "
                f"{seconds_text(thread)} ({thread.mark})"
                for thread in threads_of(item, now)
                if thread.mark
            ]
    return "\n".join(lines)


def waits_text(items: Sequence[HeartbeatFile], now: float) -> str:
    """Every wait for other ranks with what those do, the oldest first; empty if there is none."""
    by_rank = {item.heartbeat.rank: item for item in items}
    waits = [
        thread
        for item in items
        if state_of(item, now) != "ended"
        for thread in threads_of(item, now)
        if thread.phase.on
    ]
    waits.sort(key=lambda thread: -thread.seconds)
    lines: list[str] = []
    for thread in waits[:MAX_WAITS]:
        lines.append(_sentence(thread))
        lines += _follow(thread, by_rank, now, frozenset({(thread.beat.rank, thread.phase.who)}))
    if len(waits) > MAX_WAITS:
        lines.append(f"and {len(waits) - MAX_WAITS} more waits")
    return "\n".join(lines)


def _sentence(thread: ThreadNow) -> str:
    phase, on = thread.phase, thread.phase.on
    what = phase.phase.removeprefix(f"{WAIT} for ").removeprefix(WAIT).strip()
    name = f"rank {thread.beat.rank} {phase.who}".rstrip()
    whom = f", on {ranks_in_words(on)}" if on else ""
    return f"{name} waits since {seconds_text(thread)} for {what}{whom}"


def _follow(
    wait: ThreadNow, by_rank: dict[int, HeartbeatFile], now: float, seen: frozenset[tuple[int, str]], depth: int = 1
) -> Iterator[str]:
    """What the ranks do that a thread waits for, indented; their own waits are followed too."""
    indent = "  " * depth
    others = [rank for rank in wait.phase.on if rank in by_rank]
    unknown = [rank for rank in wait.phase.on if rank not in by_rank]
    others.sort(key=lambda rank: _restlessness(by_rank[rank], now))
    for rank in others[:MAX_RANKS_FOLLOWED]:
        item = by_rank[rank]
        if state_of(item, now) == "silent":
            last = item.heartbeat.phase
            yield f"{indent}rank {rank} is silent for {item.age_seconds(now):.0f} s; it last said {last!r}"
            continue
        for thread in threads_of(item, now):
            key = (rank, thread.phase.who)
            if key in seen:
                continue
            if thread.phase.on:
                yield f"{indent}{_sentence(thread)}"
                if depth < MAX_DEPTH:
                    yield from _follow(thread, by_rank, now, seen | {key}, depth + 1)
            else:
                name = f"rank {rank} {thread.phase.who}".rstrip()
                yield f"{indent}{name}: {thread.phase.phase}, since {seconds_text(thread)}"
    if len(others) > MAX_RANKS_FOLLOWED:
        yield f"{indent}and {len(others) - MAX_RANKS_FOLLOWED} more ranks"
    if unknown:
        yield f"{indent}no heartbeat of {ranks_in_words(unknown)}"


def _restlessness(item: HeartbeatFile, now: float) -> tuple[bool, float]:
    """Silent ranks first, then those that stand longest in one phase."""
    return state_of(item, now) != "silent", -max(thread.seconds for thread in threads_of(item, now))
