"""Heartbeats as they lie on the disk: the last thing that each rank said of itself.

    RUN/heartbeats/node-HOST.json   all ranks of a host, by their leader (`launch/heartbeat_files.py`)
    RUN/heartbeats/rank-N.json      a rank that is starting: its node has no file yet

Read from anywhere; a killed or stopped rank still has its last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.run_directory import RunDirectory


@dataclass(frozen=True)
class HeartbeatFile:
    """A heartbeat, its attempt, and when it was written (seconds since 1970, by the clock of the rank's node)."""

    heartbeat: Heartbeat
    attempt: int
    time: float
    gone: bool = False
    """Whether it is known from elsewhere (Slurm, the driver) that the rank lives no more."""

    def age_seconds(self, now: float) -> float:
        """Seconds since it was written, as far as the clocks of the two machines agree."""
        return max(0.0, now - self.time)


def node_path(run: RunDirectory, host: str) -> Path:
    return run.heartbeats / f"node-{quote(host, safe='')}.json"


def rank_path(run: RunDirectory, rank: int) -> Path:
    return run.heartbeats / f"rank-{rank}.json"


def read_heartbeats(run: RunDirectory) -> list[HeartbeatFile]:
    """Heartbeats of the newest attempt, the last of each rank, by rank; a file that is damaged or vanishes while it is
    read is left out."""
    found = [item for path in _paths(run) for item in _read(path)]
    attempt = max((item.attempt for item in found), default=0)
    newest: dict[int, HeartbeatFile] = {}
    for item in sorted((item for item in found if item.attempt == attempt), key=lambda item: item.time):
        newest[item.heartbeat.rank] = item
    return [newest[rank] for rank in sorted(newest)]


def last_heartbeat(run: RunDirectory, attempt: int, rank: int) -> Heartbeat | None:
    """What a rank said last in this attempt, if it is the newest."""
    found = [item for item in read_heartbeats(run) if (item.attempt, item.heartbeat.rank) == (attempt, rank)]
    return found[0].heartbeat if found else None


def damaged_files(run: RunDirectory) -> list[Path]:
    """Heartbeat files in which nothing can be read."""
    return [path for path in _paths(run) if not _read(path)]


def _paths(run: RunDirectory) -> Iterator[Path]:
    for pattern in ("node-*.json", "rank-*.json"):
        yield from sorted(run.heartbeats.glob(pattern))


def _read(path: Path) -> list[HeartbeatFile]:
    """The heartbeats in a file; none where it is damaged or gone."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return [_item(item, record) for item in record.get("ranks", [record])]
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        return []


def _item(value: dict[str, Any], record: dict[str, Any]) -> HeartbeatFile:
    """`record`: the whole file, which names the attempt."""
    return HeartbeatFile(
        heartbeat=msgspec.convert({**value, "type": Heartbeat.__name__}, Heartbeat),
        attempt=int(record.get("attempt", 0)),
        time=float(value["time"]),
    )
