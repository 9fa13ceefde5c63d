"""Checkpoints of a run: complete or not there, the newest good one found again after any kill.

    head: begin(step), Save ─► every trainer rank writes into part(step) ─► Saved ─► head: commit(step, …), prune()

No rank decides by what it sees on the filesystem: the head looks (`proposals`), the trainer ranks verify what it
proposes, and all go on from the one that all found good (`runs/start.py`). A checkpoint is `step-N/`; a step that is
saved again (after a resume) becomes `step-N.1/`, so that nothing complete is ever replaced. Begun ones are `*.part` and
count for nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pekoe.pipeline import complete_folder, files
from pekoe.pipeline.complete_folder import IncompleteFolderError
from pekoe.pipeline.messages import WrittenFile
from pekoe.pipeline.pins import Pins
from pekoe.pipeline.run_directory import RunDirectory

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
ENGINE = "engine"
"""The folder of a checkpoint that the actor's engine writes."""
CRITIC = "critic"
"""The folder that the critic's engine writes, in a run that has one."""
CONTROLLER_STATE = "controller.msgpack"
"""The controller's snapshot, in a checkpoint."""
LATE_SECONDS = 60.0
"""How long another node's file may take to come into view."""
PIN_PATIENCE_SECONDS = 120.0
"""A reader that has not said anything for so long is taken for dead."""


class CheckpointError(ValueError):
    """There are checkpoints, and none is usable: never a reason to start again from step 0."""


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A folder by step, then by how often the step was saved; ordered by both as numbers."""

    step: int
    save: int
    path: Path


class Checkpoints:
    """The checkpoints of one run, as one rank sees them."""

    def __init__(self, run: RunDirectory, keep: int, attempt: int = 0) -> None:
        """`keep` complete ones are kept; `attempt` separates what is being written from an earlier attempt's
        remains."""
        if keep < 1:
            raise ValueError(f"recover.keep: {keep}; must be at least 1")
        self._run = run
        self._folder = run.checkpoints
        self._keep = keep
        self._attempt = attempt
        self._begun: set[Path] = set()
        self._pins = Pins(run.checkpoints, PIN_PATIENCE_SECONDS)

    def begin(self, step: int) -> Path:
        """Head only, before any rank writes: an empty folder for the step; remains of an earlier try are removed."""
        self.abandon(step)
        part = self.part(step)
        # Before it can be seen: `prune` may be at work on another thread, and takes what is not begun for remains.
        self._begun.add(part)
        files.make_folder(part)
        return part

    def part(self, step: int) -> Path:
        """Any rank: the folder to write the step's files into; all ranks get the same one."""
        if step < 0:
            raise ValueError(f"checkpoint of step {step}: steps count from 0")
        return self._folder / f"step-{step}.attempt-{self._attempt}{files.PART}"

    def commit(self, step: int, facts: dict[str, Any], written: Sequence[WrittenFile]) -> Path:
        """Head only, after all ranks reported what they have written: seals the folder and gives it its name.

        `facts` go into the marker, with `step` and `attempt`. Raises OSError when the files on disk are not the
        reported ones, or when the marker cannot be written: abandon it then. ValueError without `begin`.
        """
        part = self.part(step)
        if part not in self._begun:
            raise ValueError(f"checkpoint of step {step}: commit without begin")
        taken = {found.save for found in self._all() if found.step == step}
        save = max(taken, default=-1) + 1
        final = self._folder / (f"step-{step}.{save}" if save else f"step-{step}")
        try:
            complete_folder.seal_written(
                part, {**facts, "step": step, "attempt": self._attempt}, written, retry_seconds=LATE_SECONDS
            )
        except IncompleteFolderError as error:
            raise OSError(f"checkpoint of step {step} is not what its writers reported: {error}") from error
        files.publish(part, final)
        self._begun.discard(part)
        return final

    def abandon(self, step: int) -> None:
        """Head only, after all ranks reported and one failed: removes what was written of the step; a commit that comes
        late is refused."""
        part = self.part(step)
        self._begun.discard(part)
        files.put_away(part)

    def proposals(self, retry_seconds: float = 0.0) -> Iterator[tuple[Checkpoint, str]]:
        """Head only, newest first: each checkpoint, with what is wrong with its names and sizes (empty: nothing). Each
        is looked at again for `retry_seconds` before it is called damaged."""
        for found in sorted(self._all(), reverse=True):
            yield found, self._problem(found.path, retry_seconds=retry_seconds)

    def latest(self, deep: bool = False) -> tuple[int, Path] | None:
        """For one process: the newest complete checkpoint, verified (`deep` compares hashes too); None when there never
        was one.

        Damaged ones are skipped with a logged reason. Raises CheckpointError when all are damaged.
        """
        reasons = []
        for found in sorted(self._all(), reverse=True):
            if not (problem := self._problem(found.path, deep)):
                return found.step, found.path
            logger.warning("checkpoint of step %d is skipped: %s", found.step, problem)
            reasons.append(problem)
        if reasons:
            raise self.none_usable(reasons)
        return None

    def none_usable(self, reasons: Sequence[str]) -> CheckpointError:
        """What to raise when every checkpoint is damaged."""
        return CheckpointError(
            "no checkpoint is usable, and a run never starts again from step 0 by itself; what can be done: "
            f"pekoe doctor {self._run.path}; what is wrong: {'; '.join(reasons)}"
        )

    def complete(self, step: int) -> Path:
        """The newest complete save of a step; raises ValueError when there is none."""
        for found in sorted(self._all(), reverse=True):
            if found.step == step:
                if not (problem := self._problem(found.path)):
                    return found.path
                logger.warning("checkpoint of step %d is skipped: %s", step, problem)
        have = ", ".join(str(number) for number in sorted({found.step for found in self._all()})) or "none"
        raise ValueError(f"step: no complete checkpoint of step {step}; allowed: {have}")

    def set_aside(self, damaged: Sequence[tuple[Checkpoint, str]]) -> None:
        """Head only, when the run goes on from an older one: damaged ones are for people to look at, and are not tried
        again."""
        for found, problem in damaged:
            target = self._run.put_aside(found.path, problem)
            logger.error("checkpoint of step %d is damaged and lies in %s now: %s", found.step, target, problem)

    def prune(self) -> list[Path]:
        """Head only: removes complete checkpoints beyond the newest `keep`, and remains of earlier attempts; gives the
        removed ones.

        Complete means verified now (names and sizes), so that the last `keep` good ones, and with them the one that a
        run would go on from, are never removed. Kept besides: damaged ones, for people, and those that a reader pins.
        """
        surplus = []
        for path in self._remains():
            files.put_away(path)
        num_complete = 0
        for found, problem in self.proposals():
            if problem:
                logger.warning("damaged checkpoint is left as it is: %s", problem)
                continue
            num_complete += 1
            if num_complete > self._keep and self._pins.remove_unless_pinned(found.step, found.path):
                surplus.append(found.path)
        return surplus

    @staticmethod
    def _problem(path: Path, deep: bool = False, retry_seconds: float = 0.0) -> str:
        try:
            complete_folder.verify(path, deep, retry_seconds)
        except IncompleteFolderError as error:
            return str(error)
        return ""

    def _all(self) -> list[Checkpoint]:
        found = []
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if (match := NAME.fullmatch(path.name)) and path.is_dir():
                found.append(Checkpoint(int(match[1]), int(match[2] or 0), path))
        return found

    def _remains(self) -> list[Path]:
        """Begun by earlier attempts and never finished, or on the way out."""
        begun = [path for path in self._folder.glob(f"step-*{files.PART}") if path not in self._begun]
        return begun + list(self._folder.glob(f"step-*{files.DISCARDED}"))
