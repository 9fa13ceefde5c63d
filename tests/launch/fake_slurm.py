"""Commands of Slurm that are scripts, for what no cluster can be asked to do: refuse the third array, tell what it was
given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class FakeSlurm:
    """A folder at the head of PATH. `sbatch` notes its environment and script, and gives ids from 101 on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        self.command("srun", "exit 1")
        self.command("sacct", "exit 1")
        self.command("scontrol", "echo 'MaxArraySize            = 1001'")
        self.command("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
        self.refuse_call(0)

    def command(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def refuse_call(self, number: int) -> None:
        """sbatch fails at its `number`-th call from now on; 0: never."""
        calls = self.folder / "calls"
        self.command(
            "sbatch",
            f"n=$(($(cat {calls} 2>/dev/null || echo 0) + 1)); echo $n >{calls}\n"
            f"if [ $n = {number} ]; then echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; fi\n"
            f'env >{self.folder}/environment-$n; echo "$@" >{self.folder}/arguments-$n\n'
            f'cp "${{@: -1}}" {self.folder}/script-$n\n'
            'echo "Submitted batch job $((100 + n))"',
        )

    @property
    def num_calls(self) -> int:
        path = self.folder / "calls"
        return int(path.read_text()) if path.exists() else 0

    def script(self, call: int) -> str:
        return (self.folder / f"script-{call}").read_text()

    def arguments(self, call: int) -> str:
        return (self.folder / f"arguments-{call}").read_text().strip()

    def environment(self, call: int) -> dict[str, str]:
        lines = (self.folder / f"environment-{call}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)
