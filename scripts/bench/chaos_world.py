"""A real run that is killed again and again: each time any of its processes dies by SIGKILL, then it is resumed.

The instant is aimed at what lies in the run directory (a checkpoint, shard or weights being written, a ledger record
just made, files just set aside) or is simply random. Processes are found by a mark in their environment, so that
nothing else is ever touched.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES, BATCH, EPOCH_STEPS = 40, 4, 8
"""Of an epoch of 40 examples every fifth is filtered: 8 steps."""
MARK = "PEKOE_CHAOS"
START_SECONDS, END_SECONDS, STEP_LIMIT = 120.0, 60.0, 6
"""Limits of one attempt: until its first step, from the kill until all its processes are gone, steps until it is killed
although its aim did not come."""


@dataclass(frozen=True)
class Process:
    """One process of the run."""

    pid: int
    name: str
    """`launcher`, `supervisor` (of a rank), `rank`, or another."""


@dataclass
class Kill:
    """One that was done."""

    aim: str
    victim: str
    attempt: int
    ledger_step: int
    end_seconds: float


@dataclass
class ChaosWorld:
    """A run in ROOT/chaos/NAME and what was done to it."""

    root: Path
    name: str
    overrides: dict[str, Any]
    rng: random.Random
    kills: list[Kill] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    start_seconds: float = 10.0
    """How long the last attempt took until its first step."""

    @property
    def run(self) -> Path:
        return self.root / "chaos" / self.name

    @property
    def attempt(self) -> int:
        try:
            return len(json.loads((self.run / "run.json").read_text())["attempts"]) - 1
        except (OSError, ValueError):
            return -1

    def start(self) -> subprocess.Popen[bytes]:
        """Fresh, or a resumption once there is something to resume."""
        config = self.root / "empty.yaml"
        config.write_text("{}\n")
        settings = [str(config), *(f"{key}={value}" for key, value in self.overrides.items())]
        if (self.run / "run.json").exists() and (self.run / "config.yaml").exists():
            settings = ["--resume", str(self.run)]
        path = f"{HERE}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        with (self.root / f"{self.name}.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "pekoe.launch.cli", "run", *settings], cwd=self.root,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: self.mark},
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def kill_once(self, aim: str) -> bool:
        """Starts the run, waits for the aim, kills one process, waits until all are gone. False: the run had ended well
        before."""
        launcher = self.start()
        scene = Scene(self.run, self.attempt + 1)
        if not self._wait_for(aim, scene, launcher):
            return False
        victim = self._choose(launcher.pid)
        began = time.monotonic()
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._wait_until_gone(launcher)
            return False
        self._wait_until_gone(launcher)
        seconds = round(time.monotonic() - began, 2)
        self.kills.append(Kill(aim, victim.name, scene.attempt, scene.ledger_step(), seconds))
        return True

    def finish(self, seconds: float) -> None:
        """To the end, undisturbed."""
        launcher = self.start()
        code = launcher.wait(timeout=seconds)
        assert code == 0, f"exit code {code}: {self.output()}"

    def output(self) -> str:
        return (self.root / f"{self.name}.txt").read_text(errors="replace")[-4000:]

    def _wait_for(self, aim: str, scene: Scene, launcher: subprocess.Popen[bytes]) -> bool:
        """True when the aim, or the limit of its attempt, has come."""
        began, first = time.monotonic(), scene.ledger_step()
        instant = began + self.rng.uniform(0.2, max(1.0, self.start_seconds))
        steps = self.rng.randint(1, STEP_LIMIT - 2)
        pause = self.rng.uniform(0.0, 0.3)
        comes: Callable[[], bool] = {
            "start-up": lambda: time.monotonic() > instant,
            "later": lambda: scene.new_steps(first) >= steps,
        }.get(aim, lambda: scene.shows(aim))
        moved = False
        while True:
            if launcher.poll() is not None:
                assert launcher.returncode == 0, f"{aim}: exit code {launcher.returncode}: {self.output()}"
                return False
            if not moved and scene.new_steps(first) > 0:
                moved, self.start_seconds = True, time.monotonic() - began
            if comes():
                break
            if scene.new_steps(first) >= STEP_LIMIT:
                break
            assert moved or time.monotonic() - began < START_SECONDS, f"no step came: {self.output()}"
            time.sleep(0.001)
        if aim == "later":
            time.sleep(pause)
        return True

    def _choose(self, launcher: int) -> Process:
        """A rank mostly; sometimes the process that started it, or the launcher."""
        found = list(self.processes())
        kind = self.rng.choices(["rank", "supervisor", "launcher"], [8, 1, 1])[0]
        of_kind = [process for process in found if process.name == kind]
        return self.rng.choice(of_kind) if of_kind else Process(launcher, "launcher")

    def processes(self) -> Iterator[Process]:
        """Everything that carries the mark."""
        mark = f"{MARK}={self.mark}".encode()
        lines: dict[int, tuple[int, bytes]] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    lines[int(folder.name)] = (parent, (folder / "cmdline").read_bytes())
            except (OSError, IndexError):
                continue
        for pid, (_, line) in lines.items():
            children = [child for child, (parent, text) in lines.items() if parent == pid and text == line]
            if b"pekoe.launch.rank" in line and b"mpiexec" not in line and b"proxy" not in line:
                yield Process(pid, "supervisor" if children else "rank")
            elif line:
                yield Process(pid, "launcher" if b"pekoe.launch.cli" in line else "other")

    def _wait_until_gone(self, launcher: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + END_SECONDS
        while (left := list(self.processes())) or launcher.poll() is None:
            if time.monotonic() > deadline:
                for process in left:
                    os.kill(process.pid, signal.SIGKILL)
                raise AssertionError(f"still there {END_SECONDS:g} s after a kill: {left}: {self.output()}")
            time.sleep(0.02)


class Scene:
    """What the run directory shows of an attempt as it goes."""

    def __init__(self, run: Path, attempt: int) -> None:
        self._run, self.attempt = run, attempt
        self._aside = self._names("set-aside")
        self._saved = self._names("checkpoints")
        self._first = self.ledger_step()

    def ledger_step(self) -> int:
        steps = [name[5:13] for name in self._names("ledger") if name.startswith("step-") and name.endswith(".json")]
        return max((int(step) for step in steps), default=0)

    def new_steps(self, first: int) -> int:
        """Since the attempt has gone back: the ledger is cut first."""
        step = self.ledger_step()
        self._first = min(self._first, step)
        return step - min(first, self._first)

    def shows(self, aim: str) -> bool:
        match aim:
            case "going back":
                return len(self._names("set-aside")) > len(self._aside)
            case "ledger":
                return self.new_steps(self._first) > 0
            case "checkpoint":
                return any(f"attempt-{self.attempt}" in name for name in self._names("checkpoints"))
            case "after the checkpoint":
                return any(not name.endswith(".part") for name in self._names("checkpoints") - self._saved)
            case "weights":
                return any(name.endswith(".part") for name in self._names("weights"))
            case "shard":
                folders = [name for name in self._names("shards") if name.startswith(f"{self.attempt}-")]
                return any(self._names(f"shards/{folder}") for folder in folders)
            case _:
                raise ValueError(f"aim: {aim!r}")

    def _names(self, folder: str) -> set[str]:
        try:
            return set(os.listdir(self._run / folder))
        except FileNotFoundError:
            return set()


AIMS = ("start-up", "later", "checkpoint", "going back", "ledger", "weights", "after the checkpoint", "shard")


def settings(
    root: Path, name: str, model: Path, data: Path, *, allocation: str, eta: int, epochs: int
) -> dict[str, Any]:
    """Of a tiny run with filtered groups, frequent checkpoints and small shards."""
    found = {
        "experiment_name": "chaos", "trial_name": name, "allocation": allocation, "cluster.fileroot": root,
        "cluster.device": "cpu", "cluster.threads_per_rank": 1, "cluster.heartbeat_seconds": 0.5,
        "train_dataset.type": "jsonl", "train_dataset.path": data, "train_dataset.batch_size": BATCH,
        "gconfig.n_samples": 2, "gconfig.max_new_tokens": 8, "total_train_epochs": epochs, "seed": 5,
        "rollout.max_head_offpolicyness": eta, "rollout.deterministic": str(eta == 0).lower(),
        "rollout.keep_trajectories": "shards", "rollout.shard_max_groups": 2, "recover.freq_steps": 2,
        "workflow.name": "chaos_user:FourOfFive", "reward.name": "chaos_user:digit_share",
        "actor.path": model, "actor.dtype": "float32", "actor.mb_spec.max_tokens_per_mb": 128,
        "actor.optimizer.lr": 1e-3, "stats_logger.progress": "off",
    }  # fmt: skip
    if "+" in allocation:
        found["actor.weight_update_mode"] = "disk"
    return found


def torment(world: ChaosWorld, kills: int, seconds: float) -> ChaosWorld:
    """Kills so often, at every kind of instant in turn, then lets the run come to its end."""
    aims: list[str] = []
    deadline = time.monotonic() + seconds
    while len(world.kills) < kills:
        assert time.monotonic() < deadline, f"{len(world.kills)} of {kills} kills in {seconds:g} s"
        if not aims:
            aims = [aim for aim in AIMS if aim != "weights" or "actor.weight_update_mode" in world.overrides]
            world.rng.shuffle(aims)
        aim = aims.pop()
        if aim == "going back" and world.attempt < 0:
            aim = "start-up"
        if not world.kill_once(aim):
            break
    world.finish(max(60.0, deadline - time.monotonic()))
    return world
