"""What may go wrong in a running world, done to real ones: each fault is planted by `fault_points.py`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import Outcome, base_overrides, command, environment
from test_death import error_records, heartbeats, is_alive

LIMIT = 45.0
"""Well below `cluster.silence_seconds`."""
TRAINER, ROLLOUT = (0, "trainer"), (1, "rollout")
RAISES: dict[str, tuple[dict[str, Any], tuple[int, str], str, str]] = {
    "raise_in_learner": ({}, TRAINER, "learner", "planted in the learner"),
    "raise_in_one_of_two_learners": (
        {"allocation": "hf:d2|fsdp:d2"}, (1, "trainer+rollout"), "learner", "planted in the second learner",
    ),
    "raise_in_controller": ({}, TRAINER, "controller", "planted in the controller"),
    "raise_in_rollout": ({}, ROLLOUT, "rollout", "planted in the rollout loop"),
    "raise_in_executor": ({}, ROLLOUT, "executor", "planted in the executor"),
    "raise_in_engine": ({"rollout.max_engine_restarts": 0}, ROLLOUT, "engine", "planted in the engine"),
    "raise_in_main_thread": ({}, ROLLOUT, "MainThread", "planted in the main thread"),
    "raise_in_post_office_of_head": ({}, TRAINER, "MainThread", "planted in the head's post office"),
}  # fmt: skip


class World:
    """A run in a folder of its own, started as often as needed."""

    def __init__(self, root: Path, model: Path, data: Path, **overrides: Any) -> None:
        self.root, self.path = root, root / "test" / "fault"
        self.marks = root / "marks"
        self.marks.mkdir()
        self.config = root / "empty.yaml"
        self.config.write_text("{}\n")
        self.overrides = {
            **base_overrides(root, model, data, "fault"), "train_dataset.type": "fault_points:Rows", **overrides,
        }  # fmt: skip
        self.starts = 0

    @property
    def output(self) -> str:
        return (self.root / "output.txt").read_text()

    @property
    def outcome(self) -> Outcome:
        return Outcome(-1, self.output, self.path)

    def start(self, fault: str = "", *overrides: str) -> subprocess.Popen[bytes]:
        """Fresh the first time, a resumption from then on."""
        arguments = command(self.config, self.overrides)
        if self.starts:
            arguments = [*arguments[:4], "--resume", str(self.path), *overrides]
        variables = {"FAULT": fault, "FAULT_FOLDER": str(self.marks), "FAULT_NUMBER": str(self.starts)}
        self.starts += 1
        with (self.root / "output.txt").open("wb") as output:
            return subprocess.Popen(
                arguments, env={**environment(), **variables}, cwd=self.root, stdout=output, stderr=subprocess.STDOUT
            )

    def run(self, fault: str = "", *overrides: str) -> int:
        """To its end; the exit code."""
        return self.start(fault, *overrides).wait(timeout=120)

    def wait_for_mark(self, name: str, process: subprocess.Popen[bytes], seconds: float = 90) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (text := self.mark(name)) is not None:
                return text
            assert process.poll() is None, f"the run ended before {name!r}: {self.output[-3000:]}"
            time.sleep(0.01)
        raise AssertionError(f"{name!r} did not come in {seconds} s: {self.output[-3000:]}")

    def mark(self, name: str) -> str | None:
        path = self.marks / name
        return (path.read_text() or None) if path.exists() else None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", RAISES)
def test_raising_in_any_thread_ends_the_world(fault: str, root: Path, tiny_model: Path, sums: Path) -> None:
    overrides, (rank, role), thread, text = RAISES[fault]
    world = World(root, tiny_model, sums, total_train_epochs=100, total_train_steps=500, **overrides)
    process = world.start(fault)
    began = float(world.wait_for_mark("raised", process))
    code = process.wait(timeout=120)
    took = time.time() - began
    assert code == 1, world.output[-3000:]
    assert took < LIMIT
    (record,) = error_records(world.path)
    assert (record["rank"], record["role"]) == (rank, role)
    assert text in record["error"]
    assert text in record["traceback"]
    assert record["thread"] == thread
    assert record["phase"] not in ("", "start", "starting")
    assert text in world.output
    assert not any(is_alive(int(beat["pid"])) for beat in heartbeats(world.path).values())
    assert 1 <= len(world.outcome.ledger) < 500


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("where", "who", "reason"),
    [
        ("learner", (0, "controller"), r"NoProgress: waited 6 s for the training step on rank 0 .* is 6\): version 2"),
        ("engine", (0, "controller"), r"rank 1 is silent for 6 s"),
        ("rollout", (1, "MainThread"), r"StalledRoleError: rollout on rank 1 .* no progress for 6 s"),
    ],
)  # fmt: skip
def test_a_thread_that_stands_still_ends_the_world(
    where: str, who: tuple[int, str], reason: str, root: Path, tiny_model: Path, sums: Path
) -> None:
    """The wait for it has a limit, and the record says what was waited for, with the stacks of who did not."""
    limits = {"cluster.progress_seconds": 6, "weights.ready_seconds": 4}
    world = World(root, tiny_model, sums, total_train_epochs=100, total_train_steps=500, **limits)
    process = world.start(f"hang:{where}")
    world.wait_for_mark("hangs", process)
    began = time.monotonic()
    assert process.wait(timeout=120) == 1, world.output[-3000:]
    assert time.monotonic() - began < 6 + LIMIT
    (record,) = error_records(world.path)
    assert (record["rank"], record["thread"]) == who
    assert re.search(reason, record["error"])
    waited_for = "0" if where == "learner" else "1"
    assert list(record["stacks"]) == [waited_for]
    assert re.search(rf'Thread "[a-z-]*{where}".*\n(  .*\n)*.*in stand_still', record["stacks"][waited_for])


@pytest.mark.timeout(200)
@pytest.mark.trainers
def test_damaged_shards_are_set_aside_and_their_groups_sampled_again(root: Path, tiny_model: Path, sums: Path) -> None:
    """Two colocated ranks: one trainer finds bad rows, the other none; both forget the plan, the engines wake."""
    world = World(root, tiny_model, sums, allocation="hf:d2|fsdp:d2", total_train_steps=8)
    assert world.run("damage_shards") == 0, world.output[-3000:]
    outcome = world.outcome
    assert [line["step"] for line in outcome.steps] == list(range(1, 9))
    assert sorted(group for step in outcome.consumed() for group in step) == list(range(32))
    damaged = {path.name: json.loads(path.read_text()) for path in world.marks.iterdir()}
    vanished = {name for name in damaged if "rank-0" in name and name.endswith("000003.h5")}
    assert len(damaged) == 5
    assert len(vanished) == 1
    assert outcome.steps[-1]["groups_total/damaged"] == sum(len(groups) for groups in damaged.values())
    aside = {path.name for path in (world.path / "set-aside").iterdir() if path.suffix == ".h5"}
    assert aside == set(damaged) - vanished
    for name in aside:
        record = json.loads((world.path / "set-aside" / f"{name}.reason.json").read_text())
        assert record["path"] == name.replace("__", "/")
        assert record["reason"]
    used = {entry[2].replace("/", "__") for step in outcome.ledger for entry in step["consumed"]}
    assert not used & set(damaged)
    assert all(entry[1] == 0 for step in outcome.ledger for entry in step["consumed"]), "a recovery is not a new try"
    assert not error_records(world.path)
    check_resuming_a_finished_run(world)


def check_resuming_a_finished_run(world: World) -> None:
    """Nothing is trained twice, nothing is written anew."""
    names = ("ledger", "exports", "shards", "checkpoints")
    before = {path: path.stat().st_mtime_ns for name in names for path in (world.path / name).rglob("*.*")}
    metrics = world.outcome.metrics
    assert world.run() == 0, world.output[-3000:]
    after = {path: path.stat().st_mtime_ns for name in names for path in (world.path / name).rglob("*.*")}
    assert after == before
    assert world.outcome.metrics == metrics


@dataclass(frozen=True)
class Stop:
    """SIGTERM comes while the head waits for something."""

    waits_for: str
    steps: int
    """Done afterwards."""
    override: str = ""
    """Of this attempt."""


STOPS = [
    Stop("roles to start", 0),
    Stop("the batch of version 1", 1),
    Stop("weights of version 2 to arrive", 2),
    Stop("the checkpoint of version 3", 3, "recover.asynchronous=false"),
    Stop("the training step", 4),
    Stop("trainer ranks to read rows", 4),
    Stop("the evaluation of version 6", 6),
    Stop("the last evaluation", 7, "evaluator.block=false"),
]
OTHER_WORLDS: dict[str, tuple[dict[str, Any], list[Stop]]] = {
    "colocated": (
        {"allocation": "hf:d2|fsdp:d2"},
        [
            Stop("roles to start", 0),
            Stop("engines to rest", 0),
            Stop("trainer ranks to read rows", 0),
            Stop("engines to stop at a token", 1),
            Stop("weights of version 3 to arrive", 3),
        ],
    ),
    "disk": (
        {"actor.weight_update_mode": "disk"}, [Stop("weights of version 1 to arrive", 1), Stop("the export", 7)]
    ),
    "synchronous": (
        {"rollout.max_head_offpolicyness": 0, "evaluator.at_start": "true"},
        [Stop("the evaluation of version 0", 0), Stop("the batch of version 1", 1)],
    ),
}  # fmt: skip


def evaluated_world(root: Path, model: Path, data: Path, **overrides: Any) -> World:
    evaluation = {
        "valid_dataset.type": "jsonl", "valid_dataset.path": data, "valid_dataset.size": 4,
        "evaluator.freq_steps": 6, "evaluator.at_end": "true", "evaluator.block": "true", "recover.freq_steps": 3,
    }  # fmt: skip
    return World(root, model, data, total_train_steps=7, **{**evaluation, **overrides})


@pytest.mark.timeout(400)
@pytest.mark.trainers
def test_a_run_stopped_in_every_phase_goes_on_each_time(root: Path, tiny_model: Path, sums: Path) -> None:
    stop_and_go_on(evaluated_world(root, tiny_model, sums), STOPS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OTHER_WORLDS)
def test_other_worlds_stopped_in_their_own_phases_go_on(name: str, root: Path, tiny_model: Path, sums: Path) -> None:
    overrides, stops = OTHER_WORLDS[name]
    stop_and_go_on(evaluated_world(root, tiny_model, sums, **overrides), stops)


def stop_and_go_on(world: World, stops: list[Stop]) -> None:
    """The first signal, by turns one of three, reaches `pekoe run` or the rollout rank alone, the second one all ranks
    50 ms later."""
    for stop in stops:
        number = world.starts
        slow = "_with_slow_evaluation" if stop.waits_for == "the last evaluation" else ""
        process = world.start(f"wait_for_stop{slow}:{stop.waits_for}", *filter(None, [stop.override]))
        world.wait_for_mark(f"waits {number}", process)
        ranks = {rank: int(beat["pid"]) for rank, beat in heartbeats(world.path).items()}
        first = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)[number % 3]
        os.kill(process.pid if number % 2 == 0 else ranks[1], first)
        time.sleep(0.05)
        for pid in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(timeout=120) == 75, (stop, world.output[-3000:])
        assert time.monotonic() - began < LIMIT, stop
        assert not error_records(world.path), stop
        assert [int(record["step"]) for record in world.outcome.ledger] == list(range(1, stop.steps + 1)), stop
        saved = [path.name.partition(".")[0] for path in (world.path / "checkpoints").iterdir()]
        assert f"step-{stop.steps}" in saved, stop
    assert world.run() == 0, world.output[-3000:]
    outcome = world.outcome
    assert [line["step"] for line in outcome.steps] == list(range(1, 8))
    assert sorted(group for step in outcome.consumed() for group in step) == list(range(28))
    evaluated = [line["step"] for line in outcome.metrics if "eval/accuracy" in line]
    assert len(evaluated) == len(set(evaluated))
    assert evaluated[-1] == 7
    assert (world.path / "exports" / "step-7").is_dir()


@pytest.mark.timeout(300)
@pytest.mark.trainers
def test_shards_of_a_killed_run_are_adopted_on_another_allocation(root: Path, tiny_model: Path, sums: Path) -> None:
    overrides = {"recover.freq_steps": 1, "recover.asynchronous": "false", "rollout.shard_max_groups": 1}
    world = World(root, tiny_model, sums, total_train_steps=6, **overrides)
    process = world.start("hold_with_ready_groups:8")
    ready = {int(group): shard for group, shard in json.loads(world.wait_for_mark("ready", process)).items()}
    assert len(ready) >= 8
    os.kill(int(heartbeats(world.path)[0]["pid"]), signal.SIGKILL)
    assert process.wait(timeout=120) == 1
    assert [record["rank"] for record in error_records(world.path)] == [0]
    assert world.run("", "allocation=hf:d1+fsdp:d2") == 0, world.output[-3000:]
    outcome = world.outcome
    assert [line["step"] for line in outcome.steps] == list(range(1, 7))
    assert [line["attempt"] for line in outcome.steps] == [0, 0, 1, 1, 1, 1]
    entries = {entry[0]: entry for step in outcome.ledger for entry in step["consumed"]}
    assert sum(len(step["consumed"]) for step in outcome.ledger) == 24
    assert sorted(entries) == list(range(24))
    assert {group: entries[group][2] for group in ready} == ready
    assert {entries[group][2].split("/")[1].split("-")[0] for group in set(entries) - set(ready)} <= {"0", "1"}
    sampled_again = groups_in(world.path / "shards", "1-*")
    assert sampled_again
    assert not sampled_again & set(ready)
    assert len(error_records(world.path)) == 1


def groups_in(shards: Path, folders: str) -> set[int]:
    from pekoe.pipeline.trajectory.shard import Shard

    found = set()
    for path in shards.glob(f"{folders}/*.h5"):
        with Shard(path) as shard:
            found |= {group.number for group in shard.groups()}
    return found


@pytest.mark.timeout(200)
def test_failing_transfers_and_a_failing_checkpoint_are_survived(root: Path, tiny_model: Path, sums: Path) -> None:
    world = World(root, tiny_model, sums, **{"recover.freq_steps": 1, "recover.keep": 10})
    assert world.run("fail_once_in_each_transfer_and_checkpoint") == 0, world.output[-3000:]
    outcome = world.outcome
    assert {path.name for path in world.marks.iterdir()} == {"receiver", "sender", "checkpoint"}
    assert [line["step"] for line in outcome.steps] == [1, 2, 3, 4]
    assert all(line["weights/logprob_gap_max"] < 1e-4 for line in outcome.steps)
    assert sorted(group for step in outcome.consumed() for group in step) == list(range(16))
    log = (world.path / "logs" / "0" / "rank-0.log").read_text()
    assert "transfer of version 2 failed (try 1)" in log
    assert "planted in the receiver" in log
    assert "transfer of version 3 failed (try 1)" in log
    assert "planted in the sender" in log
    assert "(try 2)" not in log
    assert "checkpoint of version 1 failed" in log
    assert sorted(path.name for path in (world.path / "checkpoints").iterdir()) == ["step-2", "step-3", "step-4"]
    assert not error_records(world.path)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("fault", "overrides"),
    [
        ("fail_once_in_a_load:3", {"allocation": "hf:d2+fsdp:d2"}),
        ("fail_once_in_a_load:1", {"actor.weight_update_mode": "disk"}),
        ("fail_once_in_a_load:1", {"allocation": "hf:d2|fsdp:d2"}),
        ("fail_once_in_the_checkpoint_of_one_rank", {"allocation": "hf:d2|fsdp:d2"}),
    ],
)
def test_what_fails_on_one_of_several_ranks_is_survived(
    fault: str, overrides: dict[str, Any], root: Path, tiny_model: Path, sums: Path
) -> None:
    world = World(root, tiny_model, sums, **{"recover.freq_steps": 1, "recover.keep": 10, **overrides})
    assert world.run(fault) == 0, world.output[-3000:]
    outcome = world.outcome
    assert [line["step"] for line in outcome.steps] == [1, 2, 3, 4]
    assert all(line["weights/logprob_gap_max"] < 1e-4 for line in outcome.steps)
    assert sorted(group for step in outcome.consumed() for group in step) == list(range(16))
    log = (world.path / "logs" / "0" / "rank-0.log").read_text()
    in_load = world.mark("load") is not None
    assert in_load != (world.mark("checkpoint") is not None), log[-3000:]
    assert ("transfer of version 2 failed (try 1)" in log) == in_load
    assert ("checkpoint of version 1 failed" in log) != in_load
    saved = sorted(path.name for path in (world.path / "checkpoints").iterdir())
    assert saved == [f"step-{step}" for step in range(1 if in_load else 2, 5)]
    assert not error_records(world.path)


@pytest.mark.timeout(200)
def test_steps_with_nothing_to_train_count(root: Path, tiny_model: Path, sums: Path) -> None:
    """One token a completion and truncated ones masked: most batches of one group have no row that trains."""
    world = World(
        root, tiny_model, sums, total_train_steps=16, **{
            "allocation": "hf:d1+fsdp:d2", "actor.mask_truncated": "true", "gconfig.max_new_tokens": 1,
            "train_dataset.batch_size": 1, "actor.adv_norm.mean_level": "batch", "actor.adv_norm.std_level": "batch",
            "valid_dataset.type": "jsonl", "valid_dataset.path": sums, "valid_dataset.size": 4,
            "evaluator.block": "true", "evaluator.freq_steps": 4, "evaluator.at_end": "true",
        },
    )  # fmt: skip
    assert world.run() == 0, world.output[-3000:]
    outcome = world.outcome
    steps = [line for line in outcome.metrics if "groups/consumed" in line]
    assert [line["step"] for line in steps] == list(range(1, 17))
    assert sorted(group for step in outcome.consumed() for group in step) == list(range(16))
    empty = [line for line in steps if line["truncated/share"] == 1.0]
    some = [line for line in steps if line["truncated/share"] < 1.0]
    assert empty
    assert some
    assert all(line.get("train/tokens", 0) == 0 for line in empty)
    assert all(line["train/tokens"] > 0 for line in some)
    evaluations = {line["step"]: line for line in outcome.metrics if "eval/accuracy" in line}
    assert list(evaluations) == [4, 8, 12, 16]
    assert all(line["eval/min_version"] == line["eval/max_version"] == step for step, line in evaluations.items())
