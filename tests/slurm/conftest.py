"""One Slurm cluster of virtual nodes for all tests of a session, and a job that takes seconds on it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runs")]

from virtual_cluster import Cluster, own_number  # noqa: E402

PACKAGES = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "ip")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Up for the whole session, and down after it."""
    if os.geteuid() != 0:
        pytest.skip("a cluster of virtual nodes needs root: network namespaces, device files and slurmd")
    lacking = [name for name in PACKAGES if shutil.which(name) is None]
    if lacking and shutil.which("apt-get") is None:
        pytest.skip(f"{', '.join(lacking)}: not installed, and there is no apt-get here to install it")
    with own_number() as number:
        made = Cluster(number, tmp_path_factory.mktemp("cluster"))
        made.down()
        made.up()
        try:
            yield made
        finally:
            made.down()


@pytest.fixture(autouse=True)
def no_job_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test finds a cluster with idle nodes and no job."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    found = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and found is not None:
        report.sections.append(("Slurm", found.logs()))
    return report


@dataclass(frozen=True)
class TinyJob:
    """A run of seconds: one rollout rank and one trainer rank, a tiny model on CPUs."""

    folder: Path
    """All nodes see it; run directories are in `folder/runs/test/NAME`."""
    model: Path
    data: Path

    def config(self, name: str, **settings: Any) -> Path:
        """A YAML file for a run of this name; settings with dots are given as `**{"cluster.n_nodes": 2}`."""
        from run_command import base_overrides

        values = {**base_overrides(self.folder / "runs", self.model, self.data, name), **settings}
        path = self.folder / f"{name}.yaml"
        path.write_text(_yaml(values))
        return path

    @property
    def variables(self) -> dict[str, str]:
        """For what submits or starts it: where Pekoe and the reward function are found."""
        return {"PYTHONPATH": str(self.folder), "PEKOE_VENV": sys.prefix}

    def run(self, name: str) -> Path:
        """The run directory of that name."""
        return self.folder / "runs" / "test" / name


@pytest.fixture(scope="session")
def tiny_job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, sums: Path) -> TinyJob:
    folder = tmp_path_factory.mktemp("tiny")
    for path in (HERE.parent / "runs" / "digit_reward.py", HERE / "slow_reward.py"):
        shutil.copy(path, folder)
    return TinyJob(folder, tiny_model, sums)


@pytest.fixture
def login(cluster: Cluster, tiny_job: TinyJob, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """This process is on a login node of the cluster, and looks at the queue each second."""
    from pekoe.launch.slurm import StateWatcher, SubmittedJob

    for name, value in {**cluster.environment, **tiny_job.variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(SubmittedJob, "watcher", StateWatcher(delay_s=1))
    return cluster


def _yaml(values: dict[str, Any]) -> str:
    """Dotted keys as nested mappings."""
    import yaml

    tree: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = str(value) if isinstance(value, Path) else value
    return yaml.safe_dump(tree)
