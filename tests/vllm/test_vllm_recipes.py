"""The recipes with vLLM in place of the default engine: only the allocation differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "runs")]

from run_command import Outcome, base_overrides, environment, run  # noqa: E402
from tiny_model import write_sums, write_tiny_model  # noqa: E402

from pekoe.pipeline.run_directory import RunDirectory  # noqa: E402
from pekoe.pipeline.trajectory.store import Store  # noqa: E402

pytestmark = pytest.mark.vllm

ALLOCATION = "allocation=vllm:d1+fsdp:d1"
GSM8K = Path(os.environ.get("PEKOE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))
STEPS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=64, head_dim=32)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl", 400)


def run_recipe(name: str, root: Path, timeout: float, *overrides: str) -> Outcome:
    """The recipe as a user starts it; the run directory is the only one in `root`."""
    command = [sys.executable, "-m", "pekoe.launch.cli", "run", f"configs/{name}.yaml", ALLOCATION]
    command += [f"cluster.fileroot={root}", "reward.name=digit_reward:digit_share", "stats_logger.progress=lines"]
    done = subprocess.run(
        [*command, *overrides], cwd=ROOT, env=environment(), timeout=timeout, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    (directory,) = root.glob("*/first")
    return Outcome(done.returncode, done.stdout, directory)


def check_trained(outcome: Outcome, steps: int, eta: int) -> None:
    """Every step is there, no token is too old, and engine and trainer agree."""
    assert [line["step"] for line in outcome.steps] == list(range(1, steps + 1))
    for line in outcome.steps:
        assert line["train/grad_norm"] > 0
        assert line["staleness/max"] <= eta
        assert line["weights/logprob_gap_max"] < 1e-3
        if line["staleness/max"] == 0:
            assert line["train/logprob_gap_max"] < 1e-3


@pytest.mark.timeout(240)
def test_the_quickstart_recipe_trains_with_vllm(tmp_path: Path, model: Path, problems: Path) -> None:
    outcome = run_recipe(
        "quickstart", tmp_path, 200, f"actor.path={model}", f"train_dataset.path={problems}",
        f"valid_dataset.path={problems}", "valid_dataset.size=16", f"total_train_steps={STEPS}",
    )  # fmt: skip
    check_trained(outcome, STEPS, eta=4)
    assert [line["step"] for line in outcome.metrics if "eval/accuracy" in line] == [0, STEPS]
    assert max(line["staleness/max"] for line in outcome.steps) > 0, "it was not asynchronous"
    versions = sampled_versions(outcome.run)
    assert min(versions) == 0
    assert max(versions) > 1, "the engine went on with newer weights"


def sampled_versions(directory: Path) -> set[int]:
    """Of all tokens of the run's shards."""
    store = Store(RunDirectory(directory))
    found: set[int] = set()
    for name in store.paths():
        num_rows = sum(len(group.rows) for group in store.notice(name).groups)
        for _, trajectory in store.read([(name, row) for row in range(num_rows)]):
            found.update(trajectory.versions[trajectory.loss_mask == 1].tolist())
    return found


@pytest.mark.timeout(240)
def test_a_users_workflow_runs_unchanged(tmp_path: Path, model: Path, problems: Path) -> None:
    overrides: dict[str, Any] = {
        **base_overrides(tmp_path, model, problems, "workflow"),
        "allocation": "vllm:d1+fsdp:d1",
        "workflow.name": "filtering_workflow:HalfOfThem",
    }
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text[-4000:]
    check_trained(outcome, 4, eta=2)
    assert outcome.steps[-1]["groups_total/rejected_none"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (GSM8K / "train.jsonl").is_file(), reason="GSM8K is not here; name its folder in PEKOE_GSM8K")
def test_the_smollm2_recipe_trains_real_weights_with_vllm(tmp_path: Path) -> None:
    smollm2 = tmp_path / "smollm2"
    subprocess.run([sys.executable, "scripts/make_smollm2_model.py", str(smollm2)], cwd=ROOT, check=True, timeout=300)
    outcome = run_recipe(
        "smollm2_gsm8k", tmp_path, 850, f"actor.path={smollm2}", f"train_dataset.path={GSM8K}", "total_train_steps=3"
    )
    assert [line["step"] for line in outcome.steps] == [1, 2, 3]
    for line in outcome.steps:
        assert line["train/grad_norm"] > 0
        assert line["reward/mean"] > 0
        assert line["weights/logprob_gap_max"] < 1e-2
