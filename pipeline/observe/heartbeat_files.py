"""Heartbeats as they lie on the disk: `RUN/heartbeats/rank-N.json`, the last thing that each rank said of itself.

Written by one leader per node (`launch/heartbeat_files.py`), read from anywhere; a killed or stopped rank still has its
last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.run_directory import RunDirectory


@dataclass(frozen=True)
class HeartbeatFile:
    """A heartbeat, its attempt, and when it was written (seconds since 1970, by the clock of the rank's node)."""

    heartbeat: Heartbeat
    attempt: int
    time: float

    def age_seconds(self, now: float) -> float:
        """Seconds since it was written, as far as the clocks of the two machines agree."""
        return max(0.0, now - self.time)


def read_heartbeats(run: RunDirectory) -> list[HeartbeatFile]:
    """Heartbeats of the newest attempt, by rank; a file that is damaged or vanishes while it is read is left out."""
    found = []
    for path in run.heartbeats.glob("rank-*.json"):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            item = HeartbeatFile(
                heartbeat=msgspec.convert({**record, "type": Heartbeat.__name__}, Heartbeat),
                attempt=int(record.get("attempt", 0)),
                time=float(record["time"]),
            )
        except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
            continue
        found.append(item)
    newest = max((item.attempt for item in found), default=0)
    return sorted((item for item in found if item.attempt == newest), key=lambda item: item.heartbeat.rank)
