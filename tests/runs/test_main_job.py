"""The main job, for real: split, 2+2, colocated and disk worlds, started by the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import KilledRun
from run_command import Outcome, base_overrides, environment, run
from tiny_model import write_tiny_model

from pekoe.pipeline.config.load import load
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.store import Store

WORLDS: dict[str, dict[str, Any]] = {
    "split": {},
    "two-and-two": {"allocation": "hf:d2+fsdp:d2"},
    "colocated": {"allocation": "hf:d2|fsdp:d2"},
    "disk": {"actor.weight_update_mode": "disk"},
    "minibatches": {
        "actor.ppo_n_minibatches": 2,
        "actor.adv_norm.mean_level": "batch",
        "actor.adv_norm.std_level": "batch",
    },
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.trainers) if name == "two-and-two" else name for name in WORLDS]
)
def test_a_world_runs_to_its_end(name: str, tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, name), "valid_dataset.type": "jsonl", "valid_dataset.path": sums,
        "valid_dataset.size": 6, "evaluator.freq_steps": 2, "evaluator.at_start": "true", "evaluator.at_end": "true",
        "recover.freq_steps": 2, **WORLDS[name],
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text
    check_steps(outcome, 4)
    evaluations = [line["step"] for line in outcome.metrics if "eval/accuracy" in line]
    assert evaluations[0] == 0
    assert evaluations[-1] == 4
    check_groups(outcome)
    check_export(outcome, tiny_model)
    if name in ("split", "two-and-two"):
        check_commands(outcome)


def check_steps(outcome: Outcome, count: int) -> None:
    assert [line["step"] for line in outcome.steps] == list(range(1, count + 1))
    for line in outcome.steps:
        assert 0 <= line["staleness/max"] <= 2
        assert line["weights/logprob_gap_max"] < 1e-4
        assert line["train/update_skipped"] == 0
        assert line["groups/consumed"] == 4
    assert not list((outcome.run / "errors").iterdir())
    assert (outcome.run.stat().st_mode & 0o777) == 0o700


def check_groups(outcome: Outcome) -> None:
    """Every group once; every shard valid; no file per sample."""
    consumed = [group for step in outcome.consumed() for group in step]
    assert sorted(consumed) == list(range(16))
    store = Store(RunDirectory(outcome.run))
    notices = [store.notice(name) for name in store.paths()]
    assert {group.group for notice in notices for group in notice.groups} == set(consumed)
    assert len(notices) <= 16


def check_export(outcome: Outcome, model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = outcome.run / "exports" / "step-4"
    trained = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    AutoTokenizer.from_pretrained(folder)
    initial = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert trained.keys() == initial.keys()
    assert any(not torch.equal(trained[name], initial[name]) for name in trained)


def check_commands(outcome: Outcome) -> None:
    """What a person looks at afterwards."""
    status = pekoe("status", outcome.run)
    assert "trainer" in status
    assert "rollout" in status
    listed = pekoe("shards", "ls", outcome.run)
    assert ".h5" in listed
    pekoe("shards", "verify", outcome.run)
    shown = pekoe("shards", "show", outcome.run)
    assert "reward" in shown
    assert load(outcome.run / "config.yaml").rollout.max_head_offpolicyness == 2
    assert (outcome.run / "code" / "pekoe" / "launch" / "world.py").exists()
    assert (outcome.run / "report" / "reward.png").stat().st_size > 1000


def pekoe(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pekoe.launch.cli", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(300)
def test_export_command_equals_the_runs_own_export(tmp_path: Path, killed_run: KilledRun) -> None:
    from safetensors.torch import load_file

    pekoe("export", killed_run.resumed, tmp_path / "out")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(killed_run.resumed / "exports" / "step-8" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.timeout(200)
def test_a_workflow_that_always_fails_stops_the_run_with_its_traceback(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    overrides = {
        **base_overrides(tmp_path, tiny_model, sums, "failing"), "workflow.name": "broken_workflow:BrokenWorkflow",
        "rollout.max_consecutive_failures": 3,
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 1
    (record,) = [path for path in (outcome.run / "errors").iterdir() if path.suffix == ".json"]
    text = record.read_text()
    assert "max_consecutive_failures" in text
    assert "this workflow is broken" in text
    assert not outcome.steps


@pytest.mark.timeout(200)
def test_new_weights_arrive_in_the_middle_of_completions(tmp_path: Path, sums: Path) -> None:
    """Long completions, small steps: sequences carry tokens of several versions, in order, and are trained on."""
    overrides = {
        **base_overrides(tmp_path, write_tiny_model(tmp_path / "model", positions=512), sums, "interrupted"),
        "gconfig.min_new_tokens": 50, "gconfig.max_new_tokens": 400, "actor.mb_spec.max_tokens_per_mb": 1024,
        "train_dataset.batch_size": 2, "total_train_steps": 12, "rollout.max_head_offpolicyness": 4,
    }  # fmt: skip
    outcome = run(tmp_path, overrides)
    assert outcome.code == 0, outcome.text
    store = Store(RunDirectory(outcome.run))
    mixed = 0
    for name in store.paths():
        rows = [row.row for group in store.notice(name).groups for row in group.rows]
        for _, trajectory in store.read([(name, row) for row in rows]):
            versions = trajectory.versions[trajectory.loss_mask == 1]
            assert (versions[1:] >= versions[:-1]).all()
            mixed += len(set(versions.tolist())) > 1
    assert mixed > 0
    assert max(line["staleness/max"] for line in outcome.steps) <= 4
    assert max(line["weights/logprob_gap_max"] for line in outcome.steps) < 1e-4
