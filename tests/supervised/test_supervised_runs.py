"""Whole runs of tasks sft, dpo and rw: they learn, they say what they left out, they stop and go on."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from run_command import run
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


@pytest.mark.trainers
@pytest.mark.timeout(300)
def test_dpo_begins_at_ln_2_and_prefers_what_was_chosen(tmp_path: Path, tiny_model: Path) -> None:
    outcome = start_and_end(tmp_path, tiny_model, "dpo", "dpo", total_train_epochs=8)
    losses, accuracy = series(outcome, "train/loss"), series(outcome, "train/accuracy")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert series(outcome, "train/margin")[0] == 0
    assert sum(losses[-4:]) / 4 < 0.6
    assert sum(accuracy[-8:]) / 8 > 0.9
    assert series(outcome, "eval/accuracy")[-1] > 0.9
    chosen, rejected = series(outcome, "eval/reward_chosen")[-1], series(outcome, "eval/reward_rejected")[-1]
    assert chosen - rejected == pytest.approx(series(outcome, "eval/margin")[-1], rel=1e-5)
    ipo = run(tmp_path, overrides(tmp_path, tiny_model, "dpo", "ipo", dpo__loss_type="ipo", total_train_steps=3))
    assert ipo.code == 0, ipo.text
    assert series(ipo, "train/loss")[0] == pytest.approx((1 / 0.2) ** 2, rel=1e-6)


@pytest.mark.trainers
@pytest.mark.timeout(300)
def test_rw_learns_and_exports_a_classifier_that_scores_alike(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    outcome = start_and_end(tmp_path, tiny_model, "rw", "rw", total_train_epochs=8)
    assert series(outcome, "train/loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert sum(series(outcome, "train/accuracy")[-8:]) / 8 > 0.9
    assert series(outcome, "eval/accuracy")[-1] > 0.9
    assert "nothing is wrong" in pekoe("doctor", outcome.run)
    folder = outcome.run / "exports" / "step-64"
    again = tmp_path / "again"
    pekoe("export", outcome.run, again)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    margins = []
    for line in (tmp_path / "rw-valid.jsonl").read_text().splitlines():
        row = json.loads(line)
        scores = []
        for side in ("chosen", "rejected"):
            ids = tokenizer.encode(row["prompt"]) + tokenizer.encode(row[side], add_special_tokens=False)
            ids.append(tokenizer.eos_token_id)
            with torch.no_grad():
                scores.append(float(model(torch.tensor([ids])).logits))
        margins.append(scores[0] - scores[1])
    assert sum(margins) / len(margins) == pytest.approx(series(outcome, "eval/margin")[-1], rel=1e-4)


@pytest.mark.trainers
@pytest.mark.timeout(400)
@pytest.mark.parametrize("task", ["sft", "dpo", "rw"])
def test_two_ranks_train_as_one_does(task: str, tmp_path: Path, tiny_model: Path) -> None:
    """In float64: what is left is the order of sums."""
    more = {"actor__dtype": "float64", "total_train_steps": 8, "num_bad": 9}
    one = start_and_end(tmp_path, tiny_model, task, "one", **more)
    two = start_and_end(tmp_path, tiny_model, task, "two", allocation="fsdp:d2", **more)
    names = {name for line in one.metrics for name in line if name.startswith(("train/", "eval/", "rows/"))}
    assert {"train/loss", "eval/loss", "rows/dropped_total"} <= names
    for name in names - {"eval/examples"}:
        assert series(two, name) == pytest.approx(series(one, name), rel=1e-6, abs=1e-9), name


@pytest.mark.trainers
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("task", "allocation"), [("sft", "fsdp:d2"), ("dpo", "fsdp:d1")])
def test_a_killed_run_goes_on_to_the_same_weights(task: str, allocation: str, tmp_path: Path, tiny_model: Path) -> None:
    more = {"allocation": allocation, "num_bad": 9, "recover__freq_steps": 4}
    whole = start_and_end(tmp_path, tiny_model, task, "whole", **more)
    keys = overrides(tmp_path, tiny_model, task, "killed", **more)
    path = tmp_path / "test" / "killed"
    process = start(tmp_path, keys)
    wait_for_step(path, 14, process)
    os.kill(int(heartbeats(path)[len(heartbeats(path)) - 1]["pid"]), signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    outcome = run(tmp_path, keys, resume=True)
    assert outcome.code == 0, outcome.text
    for name in ("train/loss", "train/grad_norm", "train/lr", "eval/loss", "rows/dropped_total"):
        assert series(outcome, name) == series(whole, name), name
    files = [folder / "exports" / "step-32" / "model.safetensors" for folder in (whole.run, outcome.run)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {line["attempt"] for line in outcome.metrics} == {0, 1}


@pytest.mark.trainers
@pytest.mark.timeout(300)
def test_a_stopped_run_saves_and_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    more = {"recover__freq_steps": "null", "total_train_epochs": 40, "evaluator__freq_steps": "null"}
    keys = overrides(tmp_path, tiny_model, "sft", "stopped", **more)
    path = tmp_path / "test" / "stopped"
    process = start(tmp_path, keys)
    wait_for_step(path, 10, process)
    os.kill(int(heartbeats(path)[0]["pid"]), signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(timeout=60) == 75, (tmp_path / "output.txt").read_text()[-3000:]
    assert time.monotonic() - began < 20
    (checkpoint,) = (path / "checkpoints").glob("step-*")
    version = int(checkpoint.name.partition("-")[2])
    assert 10 <= version < 320
    outcome = run(tmp_path, keys, resume=True)
    assert outcome.code == 0, outcome.text
    steps = [(line["step"], line["attempt"]) for line in outcome.metrics if "train/loss" in line]
    assert steps == [(step, int(step > version)) for step in range(1, 321)]


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
