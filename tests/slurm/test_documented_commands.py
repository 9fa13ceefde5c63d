"""Every command of README and docs that needs Slurm is run on the virtual cluster, in the order of reading.

Runs are made small by overrides behind the documented ones; `scripts/slurm_cluster.sh` itself is what the fixture runs.
A command that another page shows too, but for the trial's name, is run once: what follows is typed for that trial.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from conftest import TinyJob
from virtual_cluster import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from documented_commands import ROOT, commands, needs_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

STARTS = ("sbatch ", "salloc ", "pekoe submit configs/", "pekoe run configs/")
FIXTURE = "slurm_cluster.sh"
TRIAL = re.compile(r" trial_name=(\w+)")


class Reader:
    """Someone at the login node who types the commands, with a small model in place of the documented one."""

    def __init__(self, cluster: Cluster, job: TinyJob) -> None:
        self.cluster, self.job = cluster, job
        self.home = job.folder / "documented"
        self.trials: dict[str, str] = {}
        """Command without its trial's name -> the trial of its first run."""
        self.same: dict[str, str] = {}
        """Trial that was not run -> the one that stands for it."""

    def type(self, line: str) -> str:
        if FIXTURE in line:
            assert (ROOT / "scripts" / FIXTURE).exists()
            return ""
        if (match := TRIAL.search(line)) and self.is_known(line, match[1]):
            return ""
        for trial, first in self.same.items():
            line = re.sub(rf"(runs/quickstart/(?:sweeps/)?){trial}\b", rf"\1{first}", line)
        text = line.replace("runs/quickstart/", f"{self.home}/quickstart/")
        if text.startswith(STARTS):
            text = f"{text} {self.smaller(text)}"
        elif "--config configs/" in text:
            config = self.home / "checked.yaml"
            config.write_text((self.job.config("checked")).read_text())
            text = text.replace("configs/quickstart.yaml", str(config))
        variables = {**self.job.variables, "PATH": f"{Path(sys.executable).parent}:{self.cluster.environment['PATH']}"}
        done = self.cluster.run(["bash", "-c", text], seconds=240, cwd=ROOT, variables=variables, check=False)
        allowed = (0, 1) if line.startswith("pekoe doctor") else (0,)
        assert done.returncode in allowed, f"{text}\n{done.stdout[-4000:]}\n{self.cluster.logs()}"
        return done.stdout

    def is_known(self, line: str, trial: str) -> bool:
        first = self.trials.setdefault(TRIAL.sub("", line), trial)
        if first != trial:
            self.same[trial] = first
        return first != trial

    def smaller(self, line: str) -> str:
        data = self.job.data
        steps = 400 if "rollout_array.enabled" in line else 1
        return (
            f"total_train_steps={steps} total_train_epochs=400 train_dataset.batch_size=2 gconfig.n_samples=4 "
            f"gconfig.max_new_tokens=8 evaluator.freq_steps=null evaluator.at_start=false evaluator.at_end=false "
            f"actor.path={self.job.model} train_dataset.path={data} valid_dataset.path={data} valid_dataset.size=4 "
            f"cluster.fileroot={self.home} cluster.grace_seconds=20"
        )


def test_every_documented_command_for_a_cluster_runs(cluster: Cluster, tiny_job: TinyJob) -> None:
    reader = Reader(cluster, tiny_job)
    reader.home.mkdir()
    typed = [line for page, line in commands() if needs_cluster(page, line)]
    assert len(typed) > 15
    began = time.monotonic()
    for line in typed:
        assert time.monotonic() - began < 560, f"before {line!r}"
        reader.type(line)
    assert reader.same == {"slurm": "submitted", "script": "sbatch", "sweep": "swept"}
    runs = reader.home / "quickstart"
    assert {"sbatch", "submitted", "served"} <= {path.name for path in runs.iterdir()}
    for name in ("sbatch", "submitted"):
        assert (runs / name / "checkpoints" / "step-1").is_dir()
