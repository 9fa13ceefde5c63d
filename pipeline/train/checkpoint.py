"""Checkpoints of a run: complete or not there, the newest good one found again after any kill.

    head: begin(step), Save ─► every trainer rank writes into part(step) ─► Saved ─► head: commit(step), prune()

No rank decides by what it sees on the filesystem: the head looks (`latest`), and tells the others the path. A
checkpoint is `step-N/`; a step that is saved again (after a resume) becomes `step-N.1/`, so that nothing complete is
ever replaced. Begun ones are `*.part` and count for nothing.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pekoe.pipeline import complete_folder, files
from pekoe.pipeline.complete_folder import IncompleteFolderError
from pekoe.pipeline.run_directory import RunDirectory

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


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

    def __init__(self, run: RunDirectory, keep: int, attempt: int = 0, hashed: bool = True) -> None:
        """`keep` complete ones are kept; `attempt` separates what is being written from an earlier attempt's
        remains."""
        if keep < 1:
            raise ValueError(f"recover.keep: {keep}; must be at least 1")
        self._folder = run.checkpoints
        self._keep = keep
        self._attempt = attempt
        self._hashed = hashed
        self._resumed_from: Path | None = None
        self._begun: set[Path] = set()

    def begin(self, step: int) -> Path:
        """Head only, before any rank writes: an empty folder for the step; remains of an earlier try are removed."""
        self.abandon(step)
        part = self.part(step)
        self._begun.add(part)
        return part

    def part(self, step: int) -> Path:
        """Any rank: the folder to write the step's files into; all ranks get the same one."""
        if step < 0:
            raise ValueError(f"checkpoint of step {step}: steps count from 0")
        part = self._folder / f"step-{step}.attempt-{self._attempt}{files.PART}"
        part.mkdir(parents=True, exist_ok=True)
        return part

    def commit(self, step: int, facts: dict[str, Any] | None = None) -> Path:
        """Head only, after all ranks reported their files as written: seals the folder and gives it its name."""
        part = self.part(step)
        if part not in self._begun:
            raise ValueError(f"checkpoint of step {step}: commit without begin")
        taken = {found.save for found in self._all() if found.step == step}
        save = max(taken, default=-1) + 1
        final = self._folder / (f"step-{step}.{save}" if save else f"step-{step}")
        complete_folder.seal(part, {**(facts or {}), "step": step, "attempt": self._attempt}, self._hashed)
        files.publish(part, final)
        self._begun.discard(part)
        self._resumed_from = None
        return final

    def abandon(self, step: int) -> None:
        """Head only, after all ranks reported and one failed: removes what was written of the step."""
        files.put_away(self.part(step))

    def latest(self, deep: bool = False) -> tuple[int, Path] | None:
        """Head only: the newest complete checkpoint, verified (`deep` compares hashes too); None when there never was
        one.

        Damaged ones are skipped with a logged reason. Raises CheckpointError when all are damaged.
        """
        reasons = []
        for found in sorted(self._all(), reverse=True):
            try:
                complete_folder.verify(found.path, deep)
            except IncompleteFolderError as error:
                logger.warning("checkpoint of step %d is skipped: %s", found.step, error)
                reasons.append(str(error))
                continue
            self._resumed_from = found.path
            return found.step, found.path
        if reasons:
            raise CheckpointError(
                "no checkpoint is usable; repair one, or remove all to start from step 0: " + "; ".join(reasons)
            )
        return None

    def complete(self, step: int) -> Path:
        """The newest complete save of a step; raises ValueError when there is none."""
        for found in sorted(self._all(), reverse=True):
            if found.step == step:
                try:
                    complete_folder.verify(found.path)
                except IncompleteFolderError as error:
                    logger.warning("checkpoint of step %d is skipped: %s", step, error)
                    continue
                return found.path
        have = ", ".join(str(number) for number in sorted({found.step for found in self._all()})) or "none"
        raise ValueError(f"step: no complete checkpoint of step {step}; allowed: {have}")

    def open(self, path: Path, retry_seconds: float = 60.0) -> dict[str, Any]:
        """Any rank: waits until the checkpoint that the head chose is in this rank's view; gives its marker."""
        return complete_folder.verify(path, retry_seconds=retry_seconds)

    def prune(self) -> list[Path]:
        """Head only: removes complete checkpoints beyond the newest `keep`, and remains of earlier attempts.

        Kept besides: the one that this attempt resumed from, until it has written its own; damaged ones, for people.
        """
        complete = []
        for found in sorted(self._all(), reverse=True):
            try:
                complete_folder.verify(found.path)
            except IncompleteFolderError as error:
                logger.warning("damaged checkpoint is left as it is: %s", error)
                continue
            complete.append(found.path)
        surplus = [path for path in complete[self._keep :] if path != self._resumed_from]
        for path in [*surplus, *self._remains()]:
            files.put_away(path)
        return surplus

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
