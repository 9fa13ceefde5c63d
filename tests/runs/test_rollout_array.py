"""Rollout arrays: worlds that attach to a run through its directory, die, come back, and outlive an attempt of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_command import Outcome, base_overrides, environment
from test_death import heartbeats, start, wait_for_step

from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.records import POSITION_BITS
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.store import Store

ETA, NUM_EXAMPLES = 2, 40
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]


def overrides_of(root: Path, model: Path, data: Path, name: str, **more: Any) -> dict[str, Any]:
    """A trainer without rollout ranks of its own, to which worlds may attach."""
    return {
        **base_overrides(root, model, data, name), "allocation": "fsdp:d1", "rollout_array.enabled": "true",
        "rollout_array.poll_seconds": 0.1, "rollout_array.lease_seconds": 4, "total_train_epochs": 400,
        "recover.freq_steps": 2, **more,
    }  # fmt: skip


class Attached:
    """An attached world, as a user starts it."""

    def __init__(self, root: Path, run: Path, name: str, *more: str) -> None:
        self.output = root / f"{name}.txt"
        self._known = worlds(run)
        self._run = run
        arguments = [sys.executable, "-m", "pekoe.launch.cli", "attach", str(run), "allocation=hf:d1", *more]
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(
                arguments, env=environment(), cwd=root, stdout=log, stderr=subprocess.STDOUT
            )

    def pid(self, seconds: float = 120) -> int:
        """Of its rank 0, once it lives."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for name in worlds(self._run) - self._known:
                beats = read_heartbeats(RunDirectory(self._run / "attached" / name))
                if beats:
                    return int(beats[0].heartbeat.pid)
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.1)
        raise AssertionError(f"no heartbeat: {self.output.read_text()}")

    def wait(self, seconds: float = 120) -> int:
        return self.process.wait(timeout=seconds)


def worlds(run: Path) -> set[str]:
    return {path.name for path in (run / "attached").glob("*")}


def check_history(run: Path, num_steps: int, batch: int = 4) -> None:
    """Every step has a full batch, no group was trained on twice, and all groups of the data's order are there but for
    those still open at the end."""
    outcome = Outcome(0, "", run)
    consumed = outcome.consumed()
    assert [len(groups) for groups in consumed] == [batch] * num_steps
    counts = Counter(group for groups in consumed for group in groups)
    assert max(counts.values()) == 1
    order = sorted((group >> POSITION_BITS) * NUM_EXAMPLES + (group & ((1 << POSITION_BITS) - 1)) for group in counts)
    assert order[-1] < (num_steps + ETA) * batch, "admission ran ahead of its bound"
    assert max(step["staleness/max"] for step in outcome.steps) <= ETA


def ended(process: subprocess.Popen[bytes], root: Path, seconds: float = 180) -> int:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError((root / "output.txt").read_text()[-4000:]) from None


def wait_for_run(run: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not (run / "leases" / "state.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_worlds_attach_late_and_die_while_the_trainer_goes_on(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    """Three worlds; two of them are killed, one of these is started again: the trainer never stops."""
    run = tmp_path / "test" / "array"
    trainer = start(tmp_path, overrides_of(tmp_path, tiny_model, sums, "array", total_train_steps=30))
    wait_for_run(run)
    time.sleep(2)
    assert trainer.poll() is None
    first = Attached(tmp_path, run, "first")
    wait_for_step(run, 2, trainer)
    first.pid()
    second = Attached(tmp_path, run, "second")
    pid = second.pid()
    third = Attached(tmp_path, run, "third")
    wait_for_step(run, 6, trainer)
    os.kill(pid, signal.SIGKILL)
    assert second.wait() == 1
    again = Attached(tmp_path, run, "again")
    third.process.kill()
    third.wait()
    assert ended(trainer, tmp_path) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    check_history(run, 30)
    assert first.wait() == 0, first.output.read_text()
    assert again.wait() == 0, again.output.read_text()
    record = json.loads((run / "run.json").read_text())
    assert len(record["attempts"]) == 1


def test_a_world_helps_ranks_of_the_run_and_is_not_missed(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    """The run samples by itself too; when the world is killed, what it held is sampled here: else admission, which is
    bounded, would let no more steps be made."""
    run = tmp_path / "test" / "mixed"
    overrides = overrides_of(
        tmp_path, tiny_model, sums, "mixed", allocation="hf:d1+fsdp:d1", total_train_steps=4000,
        **{"rollout.max_concurrent_rollouts": 12},
    )  # fmt: skip
    trainer = start(tmp_path, overrides)
    wait_for_run(run)
    world = Attached(tmp_path, run, "world")
    world.pid()
    deadline = time.monotonic() + 120
    while not any("-rank-0/" in path.read_text() for path in (run / "ledger").glob("step-*.json")):
        assert time.monotonic() < deadline
        assert trainer.poll() is None
        time.sleep(0.2)
    os.kill(world.pid(), signal.SIGKILL)
    assert world.wait() == 1
    wait_for_step(run, len(Outcome(0, "", run).ledger) + 10 * ETA, trainer)
    trainer.terminate()
    assert ended(trainer, tmp_path) == 75, (tmp_path / "output.txt").read_text()[-3000:]
    check_history(run, len(Outcome(0, "", run).ledger))
    shards = {entry[2].split("/")[1] for record in Outcome(0, "", run).ledger for entry in record["consumed"]}
    assert len(shards) == 2
    assert "0-rank-1" in shards


def test_a_world_outlives_an_attempt_of_the_trainer(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    """The trainer is killed and goes back to its last checkpoint: the world follows, and what it sampled with weights
    of the abandoned future is never trained on."""
    run = tmp_path / "test" / "outlived"
    overrides = overrides_of(tmp_path, tiny_model, sums, "outlived", total_train_steps=16, **{"recover.freq_steps": 4})
    trainer = start(tmp_path, overrides)
    wait_for_run(run)
    world = Attached(tmp_path, run, "world")
    wait_for_step(run, 6, trainer)
    os.kill(int(heartbeats(run)[0]["pid"]), signal.SIGKILL)
    assert trainer.wait(timeout=120) == 1
    arguments = [sys.executable, "-m", "pekoe.launch.cli", "run", "--resume", str(run)]
    done = subprocess.run(
        arguments, env=environment(), cwd=tmp_path, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    check_history(run, 16)
    assert world.wait() == 0, world.output.read_text()
    assert len(worlds(run)) == 1


def test_a_world_without_a_head_ends_by_itself(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    run = tmp_path / "test" / "orphan"
    trainer = start(tmp_path, overrides_of(tmp_path, tiny_model, sums, "orphan", total_train_steps=500))
    wait_for_run(run)
    world = Attached(tmp_path, run, "world", "rollout_array.orphan_seconds=5")
    wait_for_step(run, 2, trainer)
    trainer.kill()
    trainer.wait(timeout=120)
    assert world.wait() == 0
    assert "no progress" in "".join(path.read_text() for path in (run / "attached").glob("*/logs/0/*.log"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["allocation=hf:d1", "gconfig.temperature=2"],
            "gconfig.temperature: an attached world samples as its run does",
        ),
        (["allocation=fsdp:d1"], "'fsdp' is the wrong kind of engine"),
        ([], "the run has no rollout part to copy"),
    ],
)
def test_wrong_settings_of_a_world_are_refused(
    arguments: list[str], text: str, tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    from pekoe.launch.attach import attached_config
    from pekoe.launch.attempts import prepare_run
    from pekoe.launch.cli import load_checked

    overrides = overrides_of(tmp_path, tiny_model, sums, "refused")
    (tmp_path / "empty.yaml").write_text("{}\n")
    config, _ = load_checked(str(tmp_path / "empty.yaml"), [f"{key}={value}" for key, value in overrides.items()])
    run = prepare_run(config)
    with pytest.raises(ValueError, match=text):
        attached_config(run, arguments)


def test_an_attached_world_drops_equal_groups_and_asks_the_teacher(
    tmp_path: Path, tiny_model: Path, sums: Path
) -> None:
    """The head's word on dropping travels with the offers; the teacher is built where groups are sampled."""
    run = tmp_path / "test" / "taught"
    overrides = overrides_of(
        tmp_path, tiny_model, sums, "taught", total_train_steps=4,
        **{
            "rollout.dynamic_sampling": "true", "gconfig.n_samples": 2, "gconfig.max_new_tokens": 1,
            "teacher.path": tiny_model, "teacher.dtype": "float32", "teacher.place": "engine",
            "teacher.rl_loss_weight": 1.0,
        },
    )  # fmt: skip
    trainer = start(tmp_path, overrides)
    wait_for_run(run)
    attached = Attached(tmp_path, run, "attached")
    assert ended(trainer, tmp_path) == 0
    assert attached.wait() == 0, attached.output.read_text()
    outcome = Outcome(0, "", run)
    assert [len(groups) for groups in outcome.consumed()] == [4] * 4
    assert {entry[4] for record in outcome.ledger for entry in record["filtered"]} == {"equal_rewards"}
    names = Store(RunDirectory(run)).paths()
    rows = [row for name in names for row in Store(RunDirectory(run), teacher=True).read([(name, 0), (name, 1)])]
    assert rows
    assert all(trajectory.extra["teacher_logprobs"][trajectory.loss_mask != 0].all() for _, trajectory in rows)
