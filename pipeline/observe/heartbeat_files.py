"""Heartbeats on the disk: `RUN/heartbeats/rank-N.json`, the last thing that each rank said of itself.

Written by the leader of each node, read by `pekoe status` from anywhere; a killed or stopped rank still has its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from pekoe.pipeline import files
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.run_directory import RunDirectory


@dataclass(frozen=True)
class HeartbeatFile:
    """A heartbeat and when it was written (seconds since 1970, by the clock of the rank's node)."""

    heartbeat: Heartbeat
    time: float

    def age_seconds(self, now: float) -> float:
        """Seconds since it was written, as far as the clocks of the two machines agree."""
        return max(0.0, now - self.time)


def encode_heartbeat(heartbeat: Heartbeat, time: float) -> bytes:
    """The content of a heartbeat file."""
    fields: dict[str, Any] = {name: getattr(heartbeat, name) for name in heartbeat.__struct_fields__}
    return msgspec.json.encode({**fields, "time": time})


def write_heartbeat(run: RunDirectory, heartbeat: Heartbeat, time: float) -> None:
    """Replaces the file of this rank as a whole; not fsynced, since the next one comes in seconds."""
    path = run.heartbeats / f"rank-{heartbeat.rank}.json"
    part = files.part_name(path)
    part.write_bytes(encode_heartbeat(heartbeat, time))
    part.replace(path)


def read_heartbeats(run: RunDirectory) -> list[HeartbeatFile]:
    """All heartbeats, by rank; a file that is damaged or vanishes while it is read is left out."""
    found = []
    for path in run.heartbeats.glob("rank-*.json"):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            wall = float(record.pop("time"))
            heartbeat = msgspec.convert({**record, "type": "Heartbeat"}, Heartbeat)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError, ValueError):
            continue
        found.append(HeartbeatFile(heartbeat, wall))
    return sorted(found, key=lambda item: item.heartbeat.rank)
