"""Engines that fail or stand still in a real run: the trainer goes on, no group is lost or doubled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import Outcome, base_overrides, command, environment
from test_death import error_records

from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.store import Store

TWO = {"allocation": "hf:d2+fsdp:d1"}


def run(root: Path, model: Path, data: Path, fault: str, **overrides: Any) -> Outcome:
    """A run of eight steps of two groups."""
    given = {
        **base_overrides(root, model, data, "fault"), "train_dataset.type": "engine_faults:Rows",
        "train_dataset.batch_size": 2, "total_train_steps": 8, "gconfig.min_new_tokens": 4,
        **overrides,
    }  # fmt: skip
    config = root / "empty.yaml"
    config.write_text("{}\n")
    done = subprocess.run(
        command(config, given), env={**environment(), "ENGINE_FAULT": fault}, timeout=150, cwd=root, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, root / "test" / "fault")


def log(outcome: Outcome, rank: int) -> str:
    return (outcome.run / "logs" / "0" / f"rank-{rank}.log").read_text()


def check(outcome: Outcome) -> None:
    """All steps, every group once and with its first try, log-probs as the trainer's, versions in order."""
    assert outcome.code == 0, outcome.text[-4000:]
    assert not list((outcome.run / "errors").iterdir())
    assert [line["step"] for line in outcome.steps] == list(range(1, 9))
    entries = [entry for record in outcome.ledger for entry in record["consumed"]]
    assert len({entry[0] for entry in entries}) == len(entries) == 16
    assert {entry[1] for entry in entries} == {0}, "a recovery is no new try"
    assert not [entry for record in outcome.ledger for how in ("filtered", "skipped") for entry in record[how]]
    for line in outcome.steps:
        assert 0 <= line["staleness/max"] <= 2
        assert line["weights/logprob_gap_max"] < 1e-4
    store = Store(RunDirectory(outcome.run))
    for name in store.paths():
        rows = [row.row for group in store.notice(name).groups for row in group.rows]
        for _, trajectory in store.read([(name, row) for row in rows]):
            versions = trajectory.versions[trajectory.loss_mask == 1]
            assert (versions[1:] >= versions[:-1]).all()


@pytest.mark.trainers
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("fault", "overrides"),
    [
        ("decode:1:20:1", TWO),
        ("decode:1:20:2", {}),
        ("decode:1:10:1;decode:2:25:1", {**TWO, "actor.weight_update_mode": "disk"}),
        ("load:2:3:1", TWO),
        ("load:1:2:1", {"actor.weight_update_mode": "disk"}),
        ("decode:0:20:1;decode:1:30:1", {"allocation": "hf:d2|fsdp:d2"}),
        ("load:1:3:1", {"allocation": "hf:d2|fsdp:d2"}),
        ("load:2:3:1;decode:1:30:1", {**TWO, "weights.update_mode": "drain"}),
        ("load:2:3:1;decode:1:30:1", {**TWO, "weights.update_mode": "overlap"}),
    ],
)
def test_a_run_outlives_its_engines(
    fault: str, overrides: dict[str, Any], tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    outcome = run(tmp_path, tiny_model, sums, fault, **overrides)
    check(outcome)
    for one in fault.split(";"):
        _, rank, _, times = one.split(":")
        text = log(outcome, int(rank))
        built = len(re.findall("the engine has failed and is built anew", text))
        assert built == (int(times) if one.startswith("decode") else 1), text[-3000:]
        assert "the engine stands again" in text


@pytest.mark.trainers
@pytest.mark.timeout(200)
def test_an_engine_that_fails_too_often_ends_the_run_with_its_cause(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    outcome = run(tmp_path, tiny_model, sums, "decode:1:10:9", **{"rollout.max_engine_restarts": 2})
    assert outcome.code == 1, outcome.text[-3000:]
    (record,) = error_records(outcome.run)
    assert (record["rank"], record["role"], record["thread"]) == (1, "rollout", "engine")
    assert "the engine has failed 3 times (rollout.max_engine_restarts is 2)" in record["error"]
    assert "planted in a decode" in json.dumps(record["traceback"])


@pytest.mark.trainers
@pytest.mark.timeout(200)
def test_the_trainer_goes_on_while_an_engine_stands_still(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    """Steps are made without it; once it is heard of again it gets the current version and takes part."""
    overrides = {
        **TWO, "weights.ready_seconds": 1, "train_dataset.batch_size": 1, "total_train_steps": 40,
        "total_train_epochs": 4, "rollout.max_head_offpolicyness": 12, "train_dataset.shuffle": "true",
    }  # fmt: skip
    outcome = run(tmp_path, tiny_model, sums, "stall:2:2:4", **overrides)
    assert outcome.code == 0, outcome.text[-4000:]
    assert [line["step"] for line in outcome.steps] == list(range(1, 41))
    entries = [entry for record in outcome.ledger for entry in record["consumed"]]
    assert len({entry[0] for entry in entries}) == len(entries) == 40
    text = log(outcome, 0)
    assert re.search(r"rank 2 is left out for now: rank 2 was not ready for version \d+ within 1 s", text), text[-3000:]
    assert "the engine of rank 2 is heard of again" in text
