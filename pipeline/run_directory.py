"""Where things lie in a run directory (on the shared filesystem; survives requeues)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


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
    def eval(self) -> Path:
        return self.path / "eval"

    @property
    def set_aside(self) -> Path:
        """Files taken out of the run, each with its reason."""
        return self.path / "set-aside"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def create(self) -> None:
        """Makes the folders, readable by the owner only; existing ones are kept."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        os.chmod(self.path, 0o700)
        for folder in (
            self.shards, self.ledger, self.weights, self.checkpoints, self.exports,
            self.metrics, self.heartbeats, self.errors, self.eval, self.set_aside,
        ):  # fmt: skip
            folder.mkdir(exist_ok=True)
