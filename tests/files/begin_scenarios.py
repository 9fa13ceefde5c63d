"""The beginnings of attempts, fresh and resumed, as scenarios of `crash_scenarios.py`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from pekoe.launch import attempts
from pekoe.pipeline import files
from pekoe.pipeline.config.load import load, to_yaml
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.observe.metrics import MetricsWriter, read_metrics
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.resume import CONTROLLER_STATE, go_back, training_cursor
from pekoe.pipeline.runs.start import StartPoint
from pekoe.pipeline.train.checkpoint import Checkpoints
from pekoe.pipeline.trajectory.ledger import Entry, Ledger
from pekoe.pipeline.trajectory.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parent))

from crash_scenarios import Work, write_checkpoint, write_shard_of


class _Begin:
    """What both ways to begin an attempt have in common."""

    def __init__(self) -> None:
        self.promised: list[Any] = []

    @staticmethod
    @functools.cache
    def _text(run: RunDirectory, learning_rate: float) -> str:
        return to_yaml(_Begin()._config(run, learning_rate))

    def _config(self, run: RunDirectory, learning_rate: float = 1e-6) -> RunConfig:
        config = RunConfig(experiment_name=run.path.parent.name, trial_name=run.path.name)
        config.cluster.fileroot = str(run.path.parent.parent)
        config.actor.optimizer.lr = learning_rate
        return config

    def check(self, run: RunDirectory) -> None:
        assert run.path.stat().st_mode & 0o777 == 0o700 if run.path.exists() else True
        code = run.code / "pekoe"
        if run.run_json.exists():
            record = files.read_json(run.run_json)
            numbers = [attempt["number"] for attempt in record["attempts"]]
            assert numbers == list(range(len(numbers)))
            assert set(self.promised) <= set(numbers)
            attempts.check_resumable(run)
            assert run.config.read_text() in (self._text(run, 1e-6), self._text(run, 5e-6))
            assert code.is_dir()
        if code.is_dir():
            for path in attempts.PACKAGE_ROOT.rglob("*.py"):
                assert (code / path.relative_to(attempts.PACKAGE_ROOT)).read_bytes() == path.read_bytes()


class BeginFresh(_Begin):
    """The first attempt of a run."""

    def prepare(self, run: RunDirectory) -> None:
        run.path.parent.parent.mkdir(parents=True, exist_ok=True)

    def start(self, run: RunDirectory) -> Work:
        def work() -> None:
            if not self.promised:
                self.promised.append(attempts.begin_fresh(self._config(run), "local").number)

        return work

    def done(self, run: RunDirectory) -> None:
        self.check(run)
        assert self.promised[0] in (0, 1)
        assert [path.name for path in run.code.iterdir()] == ["pekoe"]


class BeginResumed(_Begin):
    """The second attempt, with a key changed."""

    def prepare(self, run: RunDirectory) -> None:
        attempts.begin_fresh(self._config(run), "local")

    def start(self, run: RunDirectory) -> Work:
        def work() -> None:
            if not self.promised:
                self.promised.append(attempts.begin_resumed(run, self._config(run, 5e-6), "local").number)

        return work

    def done(self, run: RunDirectory) -> None:
        self.check(run)
        assert load(run.config).actor.optimizer.lr == 5e-6
        assert load(run.path / "config-before-1.yaml").actor.optimizer.lr == 1e-6, "what attempt 0 ran with is lost"


class Resume:
    """An attempt goes on from step 2 of 4: what came later is set aside, usable shards are adopted, the rest goes.

    Group g was consumed by step g + 1; groups 4 and 5 by none.
    """

    def __init__(self) -> None:
        self.promised: list[Any] = []
        self._config = RunConfig(experiment_name="e", trial_name="t")
        self._config.stats_logger.tensorboard = False
        self._data: Any = SimpleNamespace(training=range(20))

    def prepare(self, run: RunDirectory) -> None:
        run.create()
        ledger, checkpoints = Ledger(run), Checkpoints(run, keep=2, attempt=0)
        cursor = training_cursor(self._config, self._data)
        for _ in range(6):
            cursor.admit()
        for group in range(4):
            shard = write_shard_of(run, 0, [group], version=group)
            ledger.record(group + 1, consumed=[Entry(group, 0, shard, (0, 1))])
            cursor.close(group, "consumed")
            if group == 1:
                state = msgspec.msgpack.encode({"cursor": cursor.state()})
                write_checkpoint(checkpoints, 2, {CONTROLLER_STATE: state})
        write_shard_of(run, 0, [4], version=1)
        write_shard_of(run, 0, [5], version=3)
        (run.shards / "0-rank-2").mkdir()
        (run.shards / "0-rank-2" / "000000.h5").write_bytes(b"garbage")
        (run.shards / "0-rank-2" / "000001.h5.77.part").write_bytes(b"half")
        with MetricsWriter(run, 0, tensorboard=False) as metrics:
            for step in range(1, 5):
                metrics.write(step, {"train/loss": 1.0 / step})
        (run.metrics / "events.out.tfevents.1").write_bytes(b"events of the abandoned future")
        for step in (2, 4):
            (run.exports / f"step-{step}").mkdir()
            (run.exports / f"step-{step}" / "config.json").write_text("{}")

    @staticmethod
    def _unreadable(run: RunDirectory, group: int) -> bool:
        """Whether the group's shard was set aside because the disk would not give it: its groups are issued again."""
        told = run.set_aside / f"shards__0-rank-1__00000{group}.h5.reason.json"
        return told.exists() and "unreadable" in files.read_json(told)["reason"]

    def start(self, run: RunDirectory) -> Work:
        found = Checkpoints(run, keep=2).latest()
        assert found is not None
        start = StartPoint(found[0], str(found[1]), 10)

        def work() -> None:
            past = go_back(run, self._config, 1, start, self._data)
            self.promised[:] = [group.group for notice in past.notices for group in notice.groups]

        return work

    def check(self, run: RunDirectory) -> None:
        assert Checkpoints(run, keep=2).latest(deep=True) == (2, run.checkpoints / "step-2")
        assert [record.step for record in Ledger(run).read()][:2] == [1, 2]
        assert len([line for line in read_metrics(run) if line.step <= 2]) == 2
        assert (run.exports / "step-2" / "config.json").exists()
        for group in (2, 4):
            there = (run.shards / "0-rank-1" / f"00000{group}.h5").exists()
            assert there or self._unreadable(run, group), "an unconsumed shard is lost"

    def done(self, run: RunDirectory) -> None:
        self.check(run)
        adopted = [group for group in (2, 4) if not self._unreadable(run, group)]
        assert self.promised == adopted, "shards with open groups and no token newer than the start point"
        assert len(adopted) >= 1
        assert Ledger(run).steps() == [1, 2]
        assert [line.step for line in read_metrics(run)] == [1, 2]
        assert [path.name for path in run.exports.iterdir()] == ["step-2"]
        assert [path.name for path in run.metrics.iterdir()] == ["metrics.jsonl"]
        assert Store(run).paths() == [f"shards/0-rank-1/00000{group}.h5" for group in adopted]
        assert not (run.shards / "0-rank-2").exists()
        aside = [path.name for path in run.set_aside.iterdir()]
        for name in (
            "ledger__step-00000003", "ledger__step-00000004", "metrics__after-step-2", "metrics__events",
            "exports__step-4", "shards__0-rank-2__000000",
        ):  # fmt: skip
            assert any(found.startswith(name) and not found.endswith(".reason.json") for found in aside), name
