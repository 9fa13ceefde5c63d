"""The ledger: how every admitted group ended, one immutable file per training step.

A group ends exactly once per epoch: consumed (trained on), filtered (sampled, then rejected on purpose) or skipped
(given up). A record is durable before the checkpoint that relies on it is complete.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

READERS = 16
"""Records read at once: each is a round trip of a shared filesystem."""
READ_AHEAD = 256


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """The end of one group."""

    group: int
    """Admission number."""
    try_number: int
    shard: str = ""
    """Where its rows lie, relative to the run directory; empty when it was never published."""
    rows: tuple[int, ...] = ()
    reason: str = ""
    """Why it was filtered or skipped; empty for consumed groups."""


class StepRecord(msgspec.Struct, frozen=True):
    """What became of groups during the step that made version `step`."""

    step: int
    time: float
    consumed: tuple[Entry, ...] = ()
    filtered: tuple[Entry, ...] = ()
    skipped: tuple[Entry, ...] = ()

    @property
    def ended(self) -> tuple[Entry, ...]:
        """All groups that ended in this step."""
        return self.consumed + self.filtered + self.skipped


class Ledger:
    """Records of a run in `RUN/ledger/`; written by the head only. Steps count from 1: step s makes version s."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def _path(self, step: int) -> Path:
        return self._run.ledger / f"step-{step:08d}.json"

    def record(
        self,
        step: int,
        *,
        consumed: Sequence[Entry] = (),
        filtered: Sequence[Entry] = (),
        skipped: Sequence[Entry] = (),
    ) -> None:
        """Writes the record of a step, durably.

        The same again is accepted, so that it can be tried until the disk takes it. Raises ValueError when the step is
        recorded otherwise or a group is named twice; OSError when the disk refuses.
        """
        made = StepRecord(step, time.time(), tuple(consumed), tuple(filtered), tuple(skipped))
        twice = [group for group, count in Counter(entry.group for entry in made.ended).items() if count > 1]
        if twice:
            raise ValueError(f"ledger: step {step} ends groups twice: {twice[:5]}")
        if self._path(step).exists() and self._read_step(step).ended != made.ended:
            raise ValueError(f"ledger: step {step} is recorded already, with other groups")
        files.write_bytes(self._path(step), msgspec.json.encode(made))

    def record_end(self, step: int, filtered: Sequence[Entry], skipped: Sequence[Entry]) -> None:
        """Groups that ended after the last step of a finished run; nothing is written where there are none."""
        if filtered or skipped:
            made = StepRecord(step, time.time(), (), tuple(filtered), tuple(skipped))
            files.write_bytes(self._end(step), msgspec.json.encode(made))

    def _end(self, step: int) -> Path:
        return self._run.ledger / f"end-{step:08d}.json"

    def steps(self) -> list[int]:
        """Recorded steps, rising."""
        return sorted(int(path.stem.partition("-")[2]) for path in self._run.ledger.glob("step-*.json"))

    def read(self, up_to_step: int | None = None) -> list[StepRecord]:
        """What `scan` gives, all at once."""
        return list(self.scan(up_to_step))

    def scan(self, up_to_step: int | None = None) -> Iterator[StepRecord]:
        """The records of steps 1..up_to_step (all, when None), in order, a few read ahead at a time.

        Raises ValueError when a step is missing or unreadable: to go on would consume its groups again.
        """
        steps = self.steps()
        last = max(steps, default=0) if up_to_step is None else up_to_step
        missing = sorted(set(range(1, last + 1)) - set(steps))
        if missing:
            raise ValueError(
                f"ledger: no record of step {missing[0]} in {self._run.ledger} ({len(missing)} missing up to {last}); "
                f"{self._next_step()}"
            )
        with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
            for first in range(1, last + 1, READ_AHEAD):
                yield from readers.map(self._read_step, range(first, min(first + READ_AHEAD, last + 1)))

    def read_step(self, step: int) -> StepRecord:
        """One record; ValueError when it is unreadable or of another step, OSError when it is not there."""
        return self._read_step(step)

    def _read_step(self, step: int) -> StepRecord:
        path = self._path(step)
        try:
            made = msgspec.json.decode(files.read_bytes(path), type=StepRecord)
        except msgspec.DecodeError as error:
            raise ValueError(f"ledger: {path} is damaged: {error}; {self._next_step()}") from error
        if made.step != step:
            raise ValueError(f"ledger: {path} holds the record of step {made.step}")
        return made

    def _next_step(self) -> str:
        return f"what to do says: pekoe doctor {self._run.path}"

    def set_aside_after(self, step: int) -> list[int]:
        """For resume at `step`: puts later records aside; gives the steps that they were of."""
        later = [number for number in self.steps() if number > step]
        for number in reversed(later):
            self._run.put_aside(self._path(number), f"the run went on from step {step}")
        for path in self._run.ledger.glob("end-*.json"):
            self._run.put_aside(path, f"the run went on from step {step}")
        return later
