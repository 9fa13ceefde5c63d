"""Whole runs of tasks sft, dpo and rw: they learn, they say what they left out, they stop and go on."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_command import Outcome, run
from supervised_runs import overrides, series, start_and_end
from test_death import heartbeats, start, wait_for_step

from pekoe.launch.run_result import num_steps
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import keys_of
from pekoe.pipeline.observe.report import report
from pekoe.pipeline.observe.status import status
from pekoe.pipeline.registry import TASKS
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.doctor import diagnose

WHOLE: dict[str, dict[str, Any]] = {
    task: {"actor__dtype": "float64", "num_bad": num_bad, "recover__freq_steps": 4, "total_train_epochs": num_epochs}
    for task, num_bad, num_epochs in (("sft", 9, 6), ("dpo", 0, 8), ("rw", 9, 8))
}
"""What undisturbed and disturbed runs of a task share: 48 or 64 steps."""
PEKOE = [sys.executable, "-m", "pekoe.launch.cli"]


def pekoe(*arguments: object) -> str:
    done = subprocess.run([*PEKOE, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(200)
def test_sft_learns_and_reports_rows_without_labels(tmp_path: Path, tiny_model: Path) -> None:
    """The first step of unshuffled data has bad rows only: nothing happens in it, on purpose."""
    outcome = start_and_end(
        tmp_path, tiny_model, "sft", "sft", num_bad=12, train_dataset__shuffle="false", saver__freq_steps=16
    )
    steps = [line for line in outcome.metrics if "rows/examples" in line]
    assert [line["step"] for line in steps] == list(range(1, 33))
    assert steps[0]["rows/dropped_no_label"] == 8
    assert steps[0]["train/update_skipped"] == 1
    assert "train/loss" not in steps[0]
    assert steps[1]["rows/dropped_no_label"] == 4
    assert steps[-1]["rows/dropped_total"] == 4 * 12
    assert "examples that were not trained on: 48 no label" in outcome.text
    losses = series(outcome, "train/loss")
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-4:]) / 4 < 0.6 * losses[0]
    held_out = series(outcome, "eval/loss")
    assert held_out[-1] < 0.7 * held_out[0]
    assert [line["step"] for line in outcome.metrics if "eval/loss" in line] == [0, 8, 16, 24, 32]
    assert sorted(path.name for path in (outcome.run / "exports").iterdir()) == ["step-16", "step-32"]
    directory = RunDirectory(outcome.run)
    assert "train/loss" in status(outcome.run)
    assert diagnose(directory).exit_code == 0, diagnose(directory).text()
    assert "loss, first -> last" in report(directory)
    assert num_steps(directory) == 32


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., Outcome]:
    """Undisturbed runs in float64 by (task, allocation), each started once; overrides make another one."""
    root = tmp_path_factory.mktemp("whole")

    @functools.cache
    def start_once(task: str, allocation: str, **more: object) -> Outcome:
        name = "-".join([task, allocation.replace(":", "-"), *map(str, more.values())])
        return start_and_end(root, tiny_model, task, name, allocation=allocation, **WHOLE[task], **more)

    return start_once


@pytest.mark.trainers
@pytest.mark.timeout(300)
def test_dpo_begins_at_ln_2_and_prefers_what_was_chosen(whole: Callable[..., Outcome]) -> None:
    outcome = whole("dpo", "fsdp:d1")
    losses, accuracy = series(outcome, "train/loss"), series(outcome, "train/accuracy")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert series(outcome, "train/margin")[0] == 0
    assert sum(losses[-4:]) / 4 < 0.6
    assert sum(accuracy[-8:]) / 8 > 0.9
    assert series(outcome, "eval/accuracy")[-1] > 0.9
    chosen, rejected = series(outcome, "eval/reward_chosen")[-1], series(outcome, "eval/reward_rejected")[-1]
    assert chosen - rejected == pytest.approx(series(outcome, "eval/margin")[-1], rel=1e-5)


@pytest.mark.trainers
@pytest.mark.timeout(300)
def test_rw_learns_and_exports_a_classifier_that_scores_alike(
    tmp_path: Path, tiny_model: Path, whole: Callable[..., Outcome]
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    outcome = whole("rw", "fsdp:d1")
    assert series(outcome, "train/loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert sum(series(outcome, "train/accuracy")[-8:]) / 8 > 0.9
    assert series(outcome, "eval/accuracy")[-1] > 0.9
    directory = RunDirectory(outcome.run)
    assert "nothing is wrong" in diagnose(directory).text()
    folder = outcome.run / "exports" / "step-64"
    again = tmp_path / "again"
    pekoe("export", outcome.run, again)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    margins = []
    for line in (outcome.run.parents[1] / f"{outcome.run.name}-valid.jsonl").read_text().splitlines():
        row = json.loads(line)
        scores = []
        for side in ("chosen", "rejected"):
            ids = tokenizer.encode(row["prompt"]) + tokenizer.encode(row[side], add_special_tokens=False)
            ids.append(tokenizer.eos_token_id)
            with torch.no_grad():
                scores.append(float(model(torch.tensor([ids])).logits))
        margins.append(scores[0] - scores[1])
    assert sum(margins) / len(margins) == pytest.approx(series(outcome, "eval/margin")[-1], rel=1e-4)


def assert_same(two: Outcome, one: Outcome) -> None:
    """In float64: what is left is the order of sums."""
    names = {name for line in one.metrics for name in line if name.startswith(("train/", "eval/", "rows/"))}
    assert {"train/loss", "eval/loss", "rows/dropped_total"} <= names
    for name in names - {"eval/examples"}:
        assert series(two, name) == pytest.approx(series(one, name), rel=1e-6, abs=1e-9), name


@pytest.mark.trainers
@pytest.mark.timeout(400)
@pytest.mark.parametrize("task", ["sft", "rw"])
def test_two_ranks_train_as_one_does(task: str, whole: Callable[..., Outcome]) -> None:
    assert_same(whole(task, "fsdp:d2"), whole(task, "fsdp:d1"))


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("form", "first"), [("sigmoid", math.log(2)), ("ipo", (1 / 0.2) ** 2)])
def test_two_ranks_prefer_as_one_does(form: str, first: float, whole: Callable[..., Outcome]) -> None:
    one, two = (whole("dpo", allocation, dpo__loss_type=form) for allocation in ("fsdp:d1", "fsdp:d2"))
    assert series(one, "train/loss")[0] == pytest.approx(first, rel=1e-6)
    assert_same(two, one)


@pytest.mark.trainers
@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_to_the_same_weights(
    tmp_path: Path, tiny_model: Path, whole: Callable[..., Outcome]
) -> None:
    undisturbed = whole("sft", "fsdp:d2")
    keys = overrides(tmp_path, tiny_model, "sft", "killed", allocation="fsdp:d2", **WHOLE["sft"])
    path = tmp_path / "test" / "killed"
    process = start(tmp_path, keys)
    wait_for_step(path, 9, process)
    os.kill(int(heartbeats(path)[1]["pid"]), signal.SIGKILL)
    assert process.wait(timeout=120) == 1
    outcome = run(tmp_path, keys, resume=True)
    assert outcome.code == 0, outcome.text
    assert_goes_on_alike(outcome, undisturbed, 48)


def assert_goes_on_alike(outcome: Outcome, undisturbed: Outcome, num_steps: int) -> None:
    for name in ("train/loss", "train/grad_norm", "train/lr", "eval/loss", "rows/dropped_total"):
        assert series(outcome, name) == series(undisturbed, name), name
    files = [one.run / "exports" / f"step-{num_steps}" / "model.safetensors" for one in (undisturbed, outcome)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {line["attempt"] for line in outcome.metrics} == {0, 1}


@pytest.mark.trainers
@pytest.mark.timeout(300)
def test_a_stopped_run_saves_and_goes_on_to_the_same_weights(
    tmp_path: Path, tiny_model: Path, whole: Callable[..., Outcome]
) -> None:
    """The reference is the model of version 0 in each attempt."""
    undisturbed = whole("dpo", "fsdp:d1")
    keys = overrides(tmp_path, tiny_model, "dpo", "stopped", **{**WHOLE["dpo"], "recover__freq_steps": "null"})
    path = tmp_path / "test" / "stopped"
    process = start(tmp_path, keys)
    wait_for_step(path, 5, process)
    os.kill(int(heartbeats(path)[0]["pid"]), signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(timeout=120) == 75, (tmp_path / "output.txt").read_text()[-3000:]
    assert time.monotonic() - began < 50
    (checkpoint,) = (path / "checkpoints").glob("step-*")
    version = int(checkpoint.name.partition("-")[2])
    assert 5 <= version < 64
    outcome = run(tmp_path, keys, resume=True)
    assert outcome.code == 0, outcome.text
    steps = [(line["step"], line["attempt"]) for line in outcome.metrics if "train/loss" in line]
    assert steps == [(step, int(step > version)) for step in range(1, 65)]
    assert_goes_on_alike(outcome, undisturbed, 64)


def test_every_task_has_its_wiring() -> None:
    """Distillation is the main job with a teacher."""
    modules = {task: target.partition(":")[0].rpartition(".")[2] for task, target in TASKS.items()}
    assert modules == {"rl": "rl", "distill": "rl", "sft": "supervised", "dpo": "supervised", "rw": "supervised"}
    (key,) = (key for key in keys_of(RunConfig) if key.name == "task")
    assert sorted(key.choices or ()) == sorted(TASKS)


def test_what_a_task_has_no_use_for_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    from pekoe.launch.checked_config import load_checked

    (tmp_path / "empty.yaml").write_text("{}\n")

    def problems(**more: object) -> str:
        task = str(more.pop("task", "sft"))
        keys = overrides(tmp_path, tiny_model, task, "refused", **more)
        with pytest.raises(ValueError, match="allowed") as caught:
            load_checked(tmp_path / "empty.yaml", [f"{key}={value}" for key, value in keys.items()])
        return str(caught.value)

    assert "allocation" in problems(allocation="hf:d1+fsdp:d1")
    assert "allowed: demonstrations" in problems(train_dataset__type="jsonl")
    assert "allowed: preferences" in problems(task="rw", train_dataset__type="demonstrations")
    text = problems(task="dpo", actor__mb_spec__max_tokens_per_mb=60)
    assert "max_length" in text
    assert "30" in text
    assert "128" in problems(valid_dataset__max_length=200, actor__mb_spec__max_tokens_per_mb=1000)
    text = problems(task="dpo", actor__enable_tree_training=True, actor__disable_dropout=False)
    assert "actor.disable_dropout: false is not allowed with actor.enable_tree_training" in text
