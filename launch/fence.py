"""Only the newest attempt of a run may write its ledger and checkpoints.

A node that is cut off the network goes on while Slurm starts the job again elsewhere. The new driver raises the fence
in `run.json`; the old head, which looks there before every write that counts and every few seconds besides, ends.
Then the new driver waits until the old ranks are silent, and only then begins its attempt.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.observe.heartbeat_files import HeartbeatFile, read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory

REMOTE_SILENCE_SECONDS = 15.0
"""A rank on another host that was heard within this time is taken to be alive."""
POLL_SECONDS = 0.5


class SupersededError(RuntimeError):
    """A newer attempt of the run has begun: this one must not write any more."""


@dataclass(frozen=True)
class Fence:
    """What an attempt looks at before it writes."""

    run: RunDirectory
    attempt: int

    def check(self) -> None:
        """SupersededError if a newer attempt has begun, or is about to. Reads one small file."""
        newest = newest_attempt(self.run)
        if newest > self.attempt:
            raise SupersededError(
                f"attempt {newest} of {self.run.path} has begun: this one, attempt {self.attempt}, ends without "
                "another write"
            )


def newest_attempt(run: RunDirectory) -> int:
    """The number of the only attempt that may write now; -1 before the first."""
    record = files.read_json(run.run_json)
    return max(len(record["attempts"]) - 1, int(record.get("fence", -1)))


def raise_fence(run: RunDirectory) -> int:
    """From now on no attempt that has begun until now may write; returns the number of the next one."""
    record = files.read_json(run.run_json)
    number = len(record["attempts"])
    if record.get("fence") != number:
        files.write_json(run.run_json, {**record, "fence": number})
    return number


def wait_until_silent(
    run: RunDirectory,
    seconds: float,
    ended_hosts: Collection[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Until no rank of the last attempt lives. TimeoutError names one that still does after so many seconds.

    On this host processes are looked for; a rank elsewhere lives while its heartbeat is young or still changes.
    `ended_hosts`: nodes of which Slurm has said that nothing runs there any more.
    """
    end = time.monotonic() + seconds
    told = False
    seen: dict[int, tuple[float, float]] = {}
    while living := [beat for beat in read_heartbeats(run) if _lives(beat, ended_hosts, seen)]:
        first = living[0].heartbeat
        words = f"rank {first.rank} on {first.host}, pid {first.pid}"
        if not told:
            told = True
            say(f"attempt {living[0].attempt} still runs ({words}): waiting up to {seconds:.0f} s for its end")
        if time.monotonic() > end:
            raise TimeoutError(
                f"{run.path}: attempt {living[0].attempt} still runs {seconds:.0f} s after it was told to end "
                f"({words}); stop it there, then continue"
            )
        time.sleep(POLL_SECONDS)


def process_lives(pid: int) -> bool:
    """Whether the pid is a rank of a run (and not another process that got its number)."""
    try:
        return b"pekoe" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _lives(found: HeartbeatFile, ended_hosts: Collection[str], seen: dict[int, tuple[float, float]]) -> bool:
    """`seen`: rank -> (time in its heartbeat, when this process first saw that, monotonic)."""
    beat = found.heartbeat
    if beat.phase == "ended" or beat.host in ended_hosts:
        return False
    if beat.host == socket.gethostname():
        return process_lives(beat.pid)
    now, young = time.monotonic(), found.age_seconds(time.time()) < REMOTE_SILENCE_SECONDS
    first = beat.rank not in seen
    if first or seen[beat.rank][0] != found.time:
        seen[beat.rank] = (found.time, now)
        return not first or young
    return young and now - seen[beat.rank][1] < REMOTE_SILENCE_SECONDS
