"""Examines the ranks of the newest attempt by their heartbeats: gone, silent, stalled in a wait, not heard of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pekoe.pipeline.observe.heartbeat_files import HeartbeatFile, damaged_files, read_heartbeats
from pekoe.pipeline.observe.progress import duration
from pekoe.pipeline.observe.waits import SILENT_SECONDS, seconds_text, threads_of
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.attempt_history import lives
from pekoe.pipeline.runs.finding import Finding, first_few, note, ok, problem

OVER_LIMIT = "over its limit"
"""How `waits.ThreadNow.mark` calls it."""


class Places(Protocol):
    """How many ranks have which role."""

    @property
    def trainer_ranks(self) -> Sequence[int]: ...
    @property
    def rollout_ranks(self) -> Sequence[int]: ...
    @property
    def world_size(self) -> int: ...


def examine_ranks(run: RunDirectory, places: Places | None, now: float) -> list[Finding]:
    """Heartbeats of the newest attempt: silent ranks, damaged and missing files."""
    beats = read_heartbeats(run)
    findings = []
    heard = {beat.heartbeat.rank for beat in beats}
    for path in damaged_files(run):
        findings.append(note("ranks", f"heartbeats/{path.name} cannot be read; a running rank writes it anew"))
    missing = sorted(set(range(places.world_size if places else 0)) - heard)
    if missing and (beats or any(run.path.glob("logs/*/rank-*.log"))):
        findings.append(note("ranks", f"no heartbeat of rank {first_few(missing)} (of {places and places.world_size})"))
    running = [beat for beat in beats if lives(beat, now)]
    if running:
        findings += _trouble(run, beats, running, now)
        findings.append(ok("ranks", f"{len(running)} of {len(beats)} run: {_head_phase(running[0], now)}"))
    return findings


def _trouble(
    run: RunDirectory, beats: Sequence[HeartbeatFile], running: Sequence[HeartbeatFile], now: float
) -> list[Finding]:
    """Ranks that are gone while others run, silent ones, threads that use up the limit of their wait."""
    look = f"pekoe status {run.path} --stacks (who waits for whom, and where); the run ends by itself at its limits"
    gone = [beat for beat in beats if beat not in running and beat.heartbeat.phase != "ended"]
    silent = [beat for beat in running if beat.age_seconds(now) > SILENT_SECONDS]
    stalled = [
        (thread, f"{_who(beat)} {thread.phase.who}: {thread.phase.phase}, since {seconds_text(thread)}")
        for beat in running
        if beat not in silent
        for thread in threads_of(beat, now)
        if thread.mark
    ]
    findings = []
    if gone:
        words = first_few([f"{_who(beat)} in phase {beat.heartbeat.phase!r}" for beat in gone])
        findings.append(problem("ranks", f"gone while others run: {words}", "the world ends in seconds; look again"))
    if silent:
        words = first_few([f"{_who(beat)} for {beat.age_seconds(now):.0f} s" for beat in silent])
        findings.append(problem("ranks", f"silent: {words}", look))
    for over, kind in ((True, problem), (False, note)):
        words = first_few([text for thread, text in stalled if (thread.mark == OVER_LIMIT) is over])
        if words:
            findings.append(kind("ranks", f"stalled, over {'' if over else 'half of '}the limit: {words}", look))
    return findings


def _who(beat: HeartbeatFile) -> str:
    item = beat.heartbeat
    return f"rank {item.rank} ({item.role}, {item.host}, pid {item.pid})"


def _head_phase(beat: HeartbeatFile, now: float) -> str:
    phase, age = beat.heartbeat.phase, beat.heartbeat.phase_seconds + beat.age_seconds(now)
    return f"rank {beat.heartbeat.rank} in phase {phase!r} since {duration(age)}"
