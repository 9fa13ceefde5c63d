"""Where things lie in a run directory (on the shared filesystem; survives requeues)."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline import files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run; creates nothing by itself."""

    path: Path

    @property
    def config(self) -> Path:
        """The effective configuration."""
        return self.path / "config.yaml"

    @property
    def run_json(self) -> Path:
        """Id of the run, its attempts and when they began."""
        return self.path / "run.json"

    @property
    def code(self) -> Path:
        """Snapshot of the code (put on PYTHONPATH, it wins over any install)."""
        return self.path / "code"

    @property
    def shards(self) -> Path:
        return self.path / "shards"

    @property
    def archive(self) -> Path:
        """Consumed trajectories in few large files, with `rollout.keep_trajectories: archive`."""
        return self.path / "archive"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        """Hugging Face folders, one per exported version."""
        return self.path / "exports"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def slurm(self) -> Path:
        """What was submitted: scripts, job ids, submitit's files, output of the jobs."""
        return self.path / "slurm"

    @property
    def leases(self) -> Path:
        """Prompts offered to attached worlds, and who holds which."""
        return self.path / "leases"

    @property
    def inbox(self) -> Path:
        """Notices of attached worlds to the head."""
        return self.path / "inbox"

    @property
    def attached(self) -> Path:
        """A small run directory of each attached world: its logs, heartbeats, errors."""
        return self.path / "attached"

    @property
    def eval(self) -> Path:
        return self.path / "eval"

    @property
    def set_aside(self) -> Path:
        """Files taken out of the run, each with its reason."""
        return self.path / "set-aside"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def relative(self, path: Path) -> str:
        """A path inside the run as messages and the ledger name it: relative to the run directory."""
        return path.relative_to(self.path).as_posix()

    def put_aside(self, path: Path, reason: str) -> Path | None:
        """Moves a file or folder out of the run, with its reason beside it; None when it is no longer there.

        The move comes first: what is out of the run without a reason (after a crash, or on a full disk) is harmless.
        """
        files.make_folder(self.set_aside)
        name = self.relative(path).replace("/", "__")
        target = self.set_aside / name
        count = 0
        while target.exists():
            count += 1
            target = self.set_aside / f"{name}.{count}"
        try:
            files.disk.rename(path, target)
        except FileNotFoundError:
            return None
        files.fsync_folder(self.set_aside)
        files.fsync_folder(path.parent)
        record = {"path": self.relative(path), "reason": reason, "time": time.time()}
        try:
            files.write_json(target.with_name(f"{target.name}.reason.json"), record)
        except OSError as error:
            if not files.is_full(error):
                raise
            logger.warning("%s was set aside: %s (not written down: %s)", record["path"], reason, error.strerror)
        return target

    def create(self) -> None:
        """Makes the folders, readable by the owner only; existing ones are kept."""
        files.make_folder(self.path, mode=0o700)
        os.chmod(self.path, 0o700)
        for folder in (
            self.shards, self.ledger, self.weights, self.checkpoints, self.exports,
            self.metrics, self.heartbeats, self.errors, self.eval, self.set_aside,
        ):  # fmt: skip
            files.make_folder(folder)
